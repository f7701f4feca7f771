"""Does a recipe still train the same thing? Guard trials and the judge, for one tuning."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flatout import techniques
from flatout.core.ablation import LossCheck
from flatout.core.recipe import Choice, Recipe
from flatout.core.technique import Numerics
from flatout.core.trial import Outcome, Trial
from flatout.guard.activity import find_activity, find_fault, is_active
from flatout.guard.judge import aa, judge
from flatout.guard.record import GuardRecord, find_record
from flatout.workflow.lab import Lab, key_of

GUARD_STEPS = 20
"""Steps whose losses are compared; gradients and optimizer are looked at in the first three."""
ACTIVITY_STEPS = 1
SEED = 0
CALIBRATION = Recipe(choices=(Choice(technique="bf16_autocast"),))
"""The baseline in bf16 shows each tensor's natural scale of rounding; see docs/guard.md. It serves
rounding levers too, and on CPUs without bf16 units: it need not be fast, only less exact."""


@dataclass(slots=True)
class Referee:
    """Judges recipes against the baseline; runs the reference trials when first asked."""

    lab: Lab
    tell: Callable[[str], None]
    aa_check: LossCheck | None = None
    _baseline: GuardRecord | None = None
    _repeat: GuardRecord | None = None
    _calibration: GuardRecord | None = None
    _baseline_path: str | None = None
    _activity: dict[str, float] | None = None
    _verdicts: dict[str, LossCheck] | None = None

    def check(self, recipe: Recipe) -> LossCheck:
        """Return whether the recipe keeps the promise of its techniques."""
        self._verdicts = {} if self._verdicts is None else self._verdicts
        key = key_of(recipe)
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(recipe)
        return self._verdicts[key]

    def _judge(self, recipe: Recipe) -> LossCheck:
        if self.aa_check is None:
            self._make_reference()
        rest = _without_training(recipe)
        if rest.choices and rest != recipe:
            # A lever that changes the training on purpose hides what the others do.
            check = self.check(rest)
            if not check.passed:
                return check
        if self._baseline is None or self._repeat is None:
            return self.aa_check or LossCheck(status="not_compared")
        self.tell(f"guard: {recipe.label}")
        name = f"candidate-{len(self._verdicts or {})}"
        trial = self._trial(recipe, name)
        record = _record(trial)
        if record is None:
            return LossCheck(
                status="not_compared",
                why=f"the guard trial ended as {trial.outcome.value}: {trial.message}",
            )
        check = judge(
            self._baseline,
            record,
            calibration=self._calibration,
            repeat=self._repeat,
            promise=promise_of(recipe),
            changes_threads="cpu_threads" in recipe.names,
        )
        return self._look_at_activity(recipe, name, check) if check.passed else check

    def _look_at_activity(self, recipe: Recipe, name: str, check: LossCheck) -> LossCheck:
        """Reject a recipe under which dropout no longer acts: the judge compares with it off."""
        if promise_of(recipe) is Numerics.EXACT:
            return check  # those act on data and memory only, never on the model
        if self._activity is None:
            self._activity = self._measure_activity(Recipe(), "baseline") or {}
        if not is_active(self._activity):
            return check
        found = self._measure_activity(recipe, name)
        fault = find_fault(self._activity, found or {})
        if fault is None:
            return check
        status = "not_compared" if found is None else "rejected"
        return replace(check, status=status, why=fault)

    def _measure_activity(self, recipe: Recipe, name: str) -> dict[str, float] | None:
        spec = {"seed": SEED, "drops_dropout": False, "drops_autocast": False, "activity": True}
        trial = self.lab.guard(recipe, f"activity-{name}", spec, ACTIVITY_STEPS)
        return find_activity(trial.guard_path)

    def _make_reference(self) -> None:
        """Run the baseline twice and once in bf16; the first two show whether it repeats."""
        self.tell("guard: baseline against itself")
        first = self._trial(Recipe(), "baseline")
        self._baseline, self._baseline_path = _record(first), first.guard_path
        if self._baseline is None:
            self.aa_check = LossCheck(
                status="not_compared",
                why=f"the baseline's guard trial ended as {first.outcome.value}: {first.message}",
            )
            return
        self._repeat = _record(self._trial(Recipe(), "repeat"))
        if self._repeat is None:
            self.aa_check = LossCheck(status="not_compared", why="the baseline did not run twice")
            return
        self.aa_check = aa(self._baseline, self._repeat)
        self.tell("guard: calibration in bf16")
        # A script that runs in bf16 by itself is compared with itself in full precision.
        recipe = Recipe() if self._baseline.low_precision else CALIBRATION
        trial = self._trial(recipe, "calibration", drops_autocast=self._baseline.low_precision)
        self._calibration = _record(trial)

    def _trial(self, recipe: Recipe, name: str, *, drops_autocast: bool = False) -> Trial:
        spec: dict[str, Any] = {
            "seed": SEED,
            "drops_dropout": True,
            "drops_autocast": drops_autocast,
            "reference": self._baseline_path,
        }
        return self.lab.guard(recipe, name, spec, GUARD_STEPS)


def promise_of(recipe: Recipe) -> Numerics:
    """Return the mildest promise that covers every technique of the recipe.

    >>> promise_of(Recipe()).value
    'exact'
    """
    kinds = [techniques.technique_class(name).numerics for name in recipe.names]
    return max(kinds, key=lambda numerics: numerics.rank, default=Numerics.EXACT)


def _without_training(recipe: Recipe) -> Recipe:
    """Return the levers of a recipe whose effect on the numbers can be compared."""
    for name in recipe.names:
        if techniques.technique_class(name).numerics is Numerics.TRAINING:
            recipe = recipe.without(name)
    return recipe


def _record(trial: Trial) -> GuardRecord | None:
    if trial.outcome not in (Outcome.OK, Outcome.TOO_SHORT) or trial.guard_path is None:
        return None
    return find_record(trial.guard_path)
