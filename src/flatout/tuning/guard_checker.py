"""Does a recipe still train the same thing? Guard trials and the judge, for one tuning."""

import collections
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.agent.guard.activity import find_activity, find_fault, find_unknown, is_active
from flatout.agent.guard.record import GuardRecord, find_records
from flatout.guard.judge import aa, judge
from flatout.guard.obstacles import Trials
from flatout.records import catalogue
from flatout.records.ablation import LossCheck
from flatout.records.messages import named, words
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome, Trial
from flatout.tuning.experiments import Asking, Experiment, Judgement, TrialHistory, key_of
from flatout.tuning.trial_runner import TrialRunner

GUARD_STEPS = 20
"""Steps whose losses are compared; gradients and optimizer are looked at in the first three."""
ACTIVITY_STEPS = 1
ROUNDED_STEPS = 3
"""Gradients of two steps are compared."""
SEED = 0
LATEST = 4
"""Trials whose time is minded: those of a recipe and, before it, of the unchanged script."""


@dataclass(slots=True)
class GuardChecker:
    """Judges recipes against the baseline; runs the reference trials when first asked."""

    lab: TrialRunner
    tell: Callable[[str], None]
    floor: Recipe = Recipe()
    """What takes the unchanged script's place where that does not run."""
    ceiling: Numerics = Numerics.EXACT
    """The weakest promise that the user allows: what misses its own may still keep a weaker one."""
    aa_check: LossCheck | None = None
    _baseline: tuple[GuardRecord, ...] = ()
    """One for each rank, as the other two."""
    _repeat: tuple[GuardRecord, ...] = ()
    _calibration: tuple[GuardRecord, ...] = ()
    _perturbed: dict[str, tuple[GuardRecord, ...]] = field(default_factory=dict)
    """The baseline with inputs and weights `rounded` once, or their last digits moved (`nudged`);
    run where a limit is in the way."""
    _weaker: dict[str, Numerics] = field(default_factory=dict)
    """Techniques that missed their own promise, and the one that they keep here."""
    _baseline_path: str | None = None
    _activity: dict[str, float | None] | None = None
    _activity_unknown: str | None = None
    """Why the baseline's is not known; empty where it is, None while no one looked."""
    _verdicts: dict[str, LossCheck] = field(default_factory=dict)
    _latest_s: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=LATEST)
    )
    """What the latest trials took: some compile again."""

    def check(self, recipe: Recipe) -> LossCheck:
        """Return whether the recipe keeps the promise of its techniques."""
        key = key_of(recipe)
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(recipe)
        return self._verdicts[key]

    def judge(self, asked: Experiment) -> Judgement:
        """Answer a check; techniques are held to the weaker promise that they kept before."""
        self.floor = asked.options["floor"]
        self._weaker = {name: Numerics(kept) for name, kept in asked.options["weaker"].items()}
        check, trial_s = self.check(asked.recipe), max(self._latest_s, default=0.0)
        return Judgement(check=check, aa_check=self.aa_check, trial_s=trial_s)

    def _judge(self, recipe: Recipe) -> LossCheck:
        if self.aa_check is None:
            self._make_reference()
        rest = _without_training(recipe, self.floor)
        if rest.choices and rest != recipe:
            # A technique that changes the training on purpose hides what the others do.
            check = self.check(rest)
            if not check.passed:
                return check
        if not self._baseline or not self._repeat:
            return self.aa_check or LossCheck(status="not_compared")
        self.tell(words("trying.guard", recipe=recipe.label))
        # Not by its number: checks that an earlier tuning has answered are not counted here.
        digest = hashlib.sha256(key_of(recipe).encode()).hexdigest()
        name = f"candidate-{digest[:12]}"
        trial = self._trial(recipe, name)
        records = _records(trial)
        if not records:
            return _ended("trial_ended", trial)
        check = self._compare(recipe, records)
        return self._look_at_activity(recipe, name, check) if check.passed else check

    def promise_of(self, recipe: Recipe) -> Numerics:
        """Return the mildest promise that covers a recipe, from what its techniques kept here."""
        kept = [self._weaker[name] for name in recipe.names if name in self._weaker]
        return max([promise_of(recipe), *kept], key=lambda numerics: numerics.rank)

    def _compare(self, recipe: Recipe, records: tuple[GuardRecord, ...]) -> LossCheck:
        """Judge a recipe by its own promise, then by each weaker one that the user allows."""
        own = self.promise_of(recipe)
        check = first = self._compare_as(own, recipe, records)
        for promise in (Numerics.ROUNDING, Numerics.PRECISION):
            is_weaker = promise.rank > own.rank and self.ceiling.allows(promise)
            if check.status == "rejected" and is_weaker:
                check = self._compare_as(promise, recipe, records)
                about = {"promise": own.value, "why": first.why, "other": promise.value}
                why = words("guard.weaker", **about, check=check.why)
                check = replace(check, promise=promise.value, why=why)
        return check if check.passed else first

    def _compare_as(
        self, promise: Numerics, recipe: Recipe, records: tuple[GuardRecord, ...]
    ) -> LossCheck:
        """Judge every rank's record; ask how far rounding carries where a limit is in the way."""
        check = self._judged(promise, recipe, records)
        if check.status != "rejected" or promise is Numerics.EXACT or not self._calibration:
            return check
        if self._baseline[0].low_precision:
            return check  # in low precision a script rounds everything on its own
        is_precision = promise is Numerics.PRECISION
        known = self._calibration if is_precision else ()
        # What fails the widest limits needs no trial more; nor does what is further off than bf16
        # itself, which no ceiling did.
        if not self._judged(Numerics.PRECISION, recipe, records, rounded=known).passed:
            return check
        if is_precision:
            rounded = self._with_other_inputs("rounded", rounds=True)
            return self._judged(promise, recipe, records, rounded=rounded)
        nudged = self._with_other_inputs("nudged", nudges=True)
        return self._judged(promise, recipe, records, nudged=nudged)

    def _with_other_inputs(self, name: str, **how: bool) -> tuple[GuardRecord, ...]:
        """Return records of the baseline with other inputs and weights; empty where it failed."""
        if name not in self._perturbed:
            self.tell(words(f"trying.guard_{name}"))
            trial = self._trial(self.floor, name, steps=ROUNDED_STEPS, **how)
            self._perturbed[name] = _records(trial)
        return self._perturbed[name]

    def _judged(
        self,
        promise: Numerics,
        recipe: Recipe,
        records: Sequence[GuardRecord],
        *,
        rounded: Sequence[GuardRecord] = (),
        nudged: Sequence[GuardRecord] = (),
    ) -> LossCheck:
        """Judge every rank's record against the same rank's of the baseline."""
        count = len(self._baseline)
        checks = [
            judge(
                Trials(
                    baseline=baseline,
                    candidate=record,
                    calibration=calibration,
                    repeat=repeat,
                    promise=promise,
                    changes_threads=catalogue.setter_of("threads") in recipe.names,
                    rounded=own,
                    nudged=moved,
                )
            )
            for baseline, record, calibration, repeat, own, moved in zip(
                self._baseline,
                records,
                self._calibration or (None,) * count,
                self._repeat,
                rounded or (None,) * count,
                nudged or (None,) * count,
                strict=False,
            )
        ]
        # A trial that left records of fewer ranks ends the checks before the last one.
        return of_all_ranks(checks, count, len(records) if len(checks) == count else len(checks))

    def _look_at_activity(self, recipe: Recipe, name: str, check: LossCheck) -> LossCheck:
        """Reject a recipe under which dropout no longer acts: the judge compares with it off."""
        if self.promise_of(recipe) is Numerics.EXACT and not check.promise:
            return check  # those act on data and memory only, never on the model
        if self._activity_unknown is None:
            self._activity = self._measure_activity(self.floor, "baseline")
            self._activity_unknown = find_unknown(self._activity) or ""
        if self._activity_unknown:
            return replace(check, status="not_compared", why=self._activity_unknown)
        baseline = self._activity or {}
        if not is_active(baseline):
            return check
        found = self._measure_activity(recipe, name) or {}
        fault = find_fault(baseline, found)
        if fault is None:
            return check
        is_known = found and None not in found.values()
        return replace(check, status="rejected" if is_known else "not_compared", why=fault)

    def _measure_activity(self, recipe: Recipe, name: str) -> dict[str, float | None] | None:
        spec = {"seed": SEED, "drops_dropout": False, "drops_autocast": False, "activity": True}
        trial = self._run(recipe, f"activity-{name}", spec, ACTIVITY_STEPS)
        return find_activity(trial.guard_path)

    def _make_reference(self) -> None:
        """Run the baseline twice and once in bf16; the first two show whether it repeats."""
        self.tell(words("trying.guard_twice"))
        first = self._trial(self.floor, "baseline")
        self._baseline, self._baseline_path = _records(first), first.guard_path
        if not self._baseline:
            self.aa_check = _ended("baseline_ended", first)
            return
        self._repeat = _records(self._trial(self.floor, "repeat"))
        if not self._repeat:
            self.aa_check = LossCheck(status="not_compared", why=words("guard.not_twice"))
            return
        pairs = zip(self._baseline, self._repeat, strict=False)
        checks = [aa(first, second) for first, second in pairs]
        self.aa_check = of_all_ranks(checks, len(self._baseline), len(self._repeat))
        self.tell(words("trying.guard_bf16"))
        # A script that runs in bf16 on its own is compared with itself in full precision. Elsewhere
        # bf16 shows each tensor's natural scale of rounding (docs/guard-checks.md), for rounding
        # techniques and CPUs without bf16 units, too: it need not be fast, only less exact.
        recipe = self.floor
        if not self._baseline[0].low_precision:
            (name,) = catalogue.declared("calibrates_guard")
            recipe = recipe.plus(Choice(technique=name))
        trial = self._trial(recipe, "calibration", drops_autocast=self._baseline[0].low_precision)
        self._calibration = _records(trial)

    def _trial(
        self, recipe: Recipe, name: str, *, steps: int = GUARD_STEPS, **switches: bool
    ) -> Trial:
        spec: dict[str, Any] = {
            "seed": SEED,
            "drops_dropout": True,
            "drops_autocast": False,
            "reference": self._baseline_path,
            # Another setting of the compiler makes it compile again, for nothing where none draw.
            "draws": any(record.draws for record in self._baseline) or not self._baseline,
            **switches,
        }
        return self._run(recipe, name, spec, steps)

    def _run(self, recipe: Recipe, name: str, spec: Mapping[str, Any], steps: int) -> Trial:
        trial = self.lab.guard(recipe, name, spec, steps)
        if trial.outcome in (Outcome.OK, Outcome.TOO_SHORT):
            self._latest_s.append(trial.wall_s)
        return trial


def find_guilty(
    history: TrialHistory, base: Recipe, recipe: Recipe, may_go_on: Callable[[], bool]
) -> Asking[tuple[Choice, ...]]:
    """Return what of a rejected recipe the guard rejects, as far as there was time to find it.

    By bisection: the shortest beginning of what came in that is rejected ends with a guilty
    technique. It is taken out, until the rest passes. What it was tried on top of, `base`, passes.
    """
    suspects = [choice for choice in recipe.choices if choice not in base.choices]
    guilty: list[Choice] = []
    while suspects:
        check = yield from history.check(base.plus(*suspects))
        if check.passed:
            break
        passes, fails = 0, len(suspects)
        while fails - passes > 1:
            if not may_go_on():
                return tuple(guilty)
            middle = (passes + fails) // 2
            check = yield from history.check(base.plus(*suspects[:middle]))
            if check.passed:
                passes = middle
            else:
                fails = middle
        guilty.append(suspects.pop(fails - 1))
        if suspects and not may_go_on():
            break
    return tuple(guilty)


def promise_of(recipe: Recipe) -> Numerics:
    """Return the mildest promise that covers every technique of the recipe.

    >>> promise_of(Recipe()).value
    'exact'
    """
    kinds = [catalogue.technique_class(name).numerics for name in recipe.names]
    return max(kinds, key=lambda numerics: numerics.rank, default=Numerics.EXACT)


def _without_training(recipe: Recipe, floor: Recipe) -> Recipe:
    """Return the techniques of a recipe whose effect on the numbers can be compared."""
    for name in set(recipe.names) - set(floor.names):
        if catalogue.technique_class(name).numerics is Numerics.TRAINING:
            recipe = recipe.without(name)
    return recipe


def _records(trial: Trial) -> tuple[GuardRecord, ...]:
    if trial.outcome not in (Outcome.OK, Outcome.TOO_SHORT):
        return ()
    return find_records(trial.guard_path)


def _ended(name: str, trial: Trial) -> LossCheck:
    """Return that nothing was compared, as a trial gave no record."""
    outcome = named("outcome", trial.outcome.value)
    why = words(f"guard.{name}", outcome=outcome, message=trial.message)
    return LossCheck(status="not_compared", why=why)


def of_all_ranks(checks: Sequence[LossCheck], expected: int, found: int) -> LossCheck:
    """Return the check that decides: the first that failed, else the first rank's."""
    if expected != found:
        why = words("guard.rank_records", n=str(found), all=str(expected))
        return LossCheck(status="not_compared", why=why)
    for rank, check in enumerate(checks):
        if not check.passed:
            why = words("joint.rank", rank=str(rank), why=check.why)
            return replace(check, why=why) if expected > 1 else check
    return checks[0]
