"""Where a tuning is: the recipe so far, what was tried, and the time that is left."""

import functools
from dataclasses import dataclass, field, replace

from flatout.records.ablation import Row, Verdict
from flatout.records.catalogue import technique_class
from flatout.records.live import Progress, Tell
from flatout.records.messages import code_of, words
from flatout.records.profile import Profile
from flatout.records.recipe import Choice, Recipe
from flatout.records.statistics import Decision, InProcess, Rule
from flatout.tuning.experiments import Asking, Budget, TrialHistory, key_of
from flatout.tuning.extra_profiling import Looks
from flatout.tuning.guard_checker import find_guilty
from flatout.tuning.history import Errors
from flatout.tuning.pairs import Match, Sides, event_of, play, row_of, unchecked
from flatout.tuning.ranking import Candidate, Experience, Search, typical_pairs
from flatout.tuning.worker_scan import WorkerScans

FIRST_PAIRS = 2
"""Pairs after which a technique's own profile is asked what else it needs."""
FIRST_GUARD_TRIALS = 5
"""Guard trials of the first recipe: before it the unchanged script twice and once in bf16."""
GUARD_TRIALS = 2
"""Guard trials of one more recipe: its gradients, and whether its dropout acts."""
OVERDRAFT = 0.1
"""Share of the budget that the pairs of what looks like a gain may take beyond it, where no other
is proven: all that was found hangs on them."""
RACES = ("screen.raced", "screen.raced_together")
"""What a race that decided nothing is called in its row, by the names of the messages."""
DEFAULT_TRIAL_S = 10.0
"""What a trial takes, before one was timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A technique that the pairs so far did not decide."""

    candidate: Candidate
    match: Match
    base: Recipe
    """What it was played on top of."""
    row: Row


@dataclass(slots=True, kw_only=True)
class TuningState:
    """The state of one tuning."""

    history: TrialHistory
    budget: Budget
    """The history's: the time that is left as of the latest record."""
    tell: Tell
    search: Search
    confirm_pairs: int
    recipe: Recipe
    floor: Recipe = Recipe()
    """What the script does not run without."""
    profile: Profile
    """Of the recipe so far."""
    scans: WorkerScans
    looks: Looks = field(default_factory=Looks)
    """What was seen of the unchanged script alongside its timed steps."""
    earlier: Errors = field(default_factory=dict)
    """What earlier tunings on this machine say of predictions."""
    rows: list[Row] = field(default_factory=list)
    played: set[str] = field(default_factory=set)
    """Labels of the techniques of every recipe that was played."""
    settled: set[str] = field(default_factory=set)
    """Techniques that came in together: another setting of one would undo the other."""
    undecided: list[Open] = field(default_factory=list)
    bundled: frozenset[str] = frozenset()
    """Labels of the open techniques that were played together last."""
    bundles: list[frozenset[str]] | None = None
    """Labels of the techniques to play as one next; None before anything was played so."""
    has_played_pair: bool = False
    """Whether the two techniques that a scan saw to help together were played as one."""
    passengers: frozenset[str] = frozenset()
    """Techniques that came in as one without a proof of their own."""
    sides: dict[tuple[str, str], Sides] = field(default_factory=dict)
    """The pairs of each two recipes that were compared, by their keys."""
    ran_out: bool = False
    """Whether the time ended the pairs of a first recipe that looks like a gain: nothing else gets
    what is left of it."""
    best_ratio: float = 1.0
    race: Match | None = None
    """That of the recipe so far against the unchanged script, where it is no winner of many: a
    screen proposed it, or nothing was played before."""
    passed_over: dict[str, str] = field(default_factory=dict)
    """Techniques that were not tried, each with the reason; the latest profile decides."""
    refused: dict[str, str] = field(default_factory=dict)
    """What could not be switched in a screen, by label, and what it said."""
    unscreened: list[Candidate] = field(default_factory=list)
    """What a screen was to switch and had no time for."""
    notes: list[str] = field(default_factory=list)
    stopped: str = "finished"

    @property
    def baseline(self) -> Recipe:
        """The unchanged script, with the loaders that the recipe would touch."""
        return replace(self.floor, training_loaders=self.recipe.training_loaders)

    @property
    def finest(self) -> float:
        """The smallest gain that any pairs so far could show; none is held to a coarser one.

        Fewer pairs than decide without a prior do not know the noise, and count for nothing here.
        """
        pairs = [x for row in self.rows if (x := row.comparison) and x.source == "pairs"]
        known = [p.resolution for p in pairs if p.n >= Rule().min_pairs_without_prior]
        return min(known, default=1.0)

    @property
    def trial_s(self) -> float:
        """What one trial of the recipe so far takes."""
        return self.history.cost_s(self.recipe, default=DEFAULT_TRIAL_S)

    @property
    def cost_s(self) -> float:
        """What trying one more candidate typically takes."""
        return 2 * typical_pairs(in_turns=self.history.takes_turns) * self.trial_s

    @property
    def experience(self) -> Experience:
        """What the outcomes so far say about predictions, and what a trial takes."""
        outcomes: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            if row.comparison and row.predicted_ratio and not row.together_with:
                family = technique_class(row.choice.technique).family
                pair = (row.predicted_ratio, row.comparison.ratio)
                outcomes.setdefault(family, []).append(pair)
        return Experience(
            outcomes=outcomes,
            trial_s=self.trial_s,
            pairs=typical_pairs(in_turns=self.history.takes_turns),
            errors=self.earlier,
        )

    @property
    def reserve_s(self) -> float:
        """The time to keep for the confirmation; nothing to confirm needs none."""
        if self.recipe == self.baseline:
            return 0.0
        one = self.trial_s
        pairs_s = self.confirm_pairs * (one + self.history.cost_s(self.baseline, default=one))
        return pairs_s + GUARD_TRIALS * self.history.guard_cost_s(default=one)

    @property
    def is_first_look(self) -> bool:
        """Whether nothing was tried yet and a look at one technique fits in, if not its proof."""
        is_first = not any(row.stage == "add" for row in self.rows)
        return is_first and self.budget.left_s > FIRST_PAIRS * self.trial_s

    def has_time(self, *, for_candidates: float = 1.0) -> bool:
        """Return whether so many more candidates fit in before the confirmation."""
        needed_s = for_candidates * self.cost_s + self.reserve_s
        return not self.ran_out and self.budget.left_s >= needed_s

    def play(
        self, recipe: Recipe, rule: Rule, in_process: InProcess | None = None
    ) -> Asking[Match]:
        """Play a recipe against the one so far while there is time before the confirmation.

        It goes on from the pairs of the two that were played before, unless others disturbed them.
        The pairs that can decide on a first recipe are played while there is any time: without them
        everything before was for nothing. Further ones leave the time for its guard, and go a
        little beyond the budget where it looks like a gain.
        """
        one = self.trial_s

        def may_go_on(pairs: int, beyond_s: float = 0.0) -> bool:
            pair_s = one + self.history.cost_s(recipe, default=one)
            if self.reserve_s:
                return self.budget.left_s > self.reserve_s + pair_s
            if pairs < Rule().min_pairs_without_prior:
                return self.budget.left_s + beyond_s > 0
            guard_s = FIRST_GUARD_TRIALS * self.history.guard_cost_s(default=one)
            return self.budget.left_s + beyond_s > guard_s + pair_s

        keys = (key_of(self.recipe), key_of(recipe))
        sides = self.sides.setdefault(keys, Sides())
        sides.in_process = in_process or sides.in_process
        compared = functools.partial(play, self.history, self.recipe, recipe, rule=rule)
        match = yield from compared(may_go_on=may_go_on, sides=sides)
        if not self.reserve_s and match.is_cut_short(rule):
            overdraft_s = OVERDRAFT * self.budget.total_s
            match = yield from compared(
                may_go_on=lambda pairs: may_go_on(pairs, overdraft_s), sides=match.sides
            )
            self.ran_out = match.is_cut_short(rule)
        if match.failure is not None or match.disturbed:
            del self.sides[keys]
        return match

    def say(self, trying: str, *, event: str = "") -> None:
        """Report the progress."""
        self.tell(progress(self.budget, trying, self.best_ratio, event=event))

    def looked(self, profile: Profile, recipe: Recipe) -> Profile:
        """Return a timed profile with what the closer looks say of its recipe."""
        return self.looks.added_to(profile, recipe.names, self.floor.names)

    def settle(
        self,
        candidate: Candidate,
        recipe: Recipe,
        match: Match,
        together_with: tuple[str, ...] = (),
    ) -> Asking[Row]:
        """Note the row, and take the recipe on where it was kept."""
        is_only_look = not self.played and self.recipe == self.baseline
        self.played |= {choice.label for choice in recipe.choices}
        check = unchecked()
        if match.decision is Decision.KEPT:
            check = yield from self.history.check(recipe)
            if check.passed and check.promise and not together_with:
                self.history.weaker[candidate.choice.technique] = check.promise
        row = replace(row_of(candidate, self.recipe, match, check), together_with=together_with)
        if together_with:
            name = "row.together_why" if row.why else "row.together"
            row = replace(row, why=words(name, techniques=together_with, why=row.why))
        self.rows = [one for one in self.rows if not _was_open(one, row)]
        self.rows.append(row)
        if row.verdict is Verdict.KEPT and match.candidate is not None:
            self.recipe, self.race = recipe, match if is_only_look else None
            self.profile = with_attention_of(self.profile, match.candidate)
            self.settled |= {candidate.choice.technique, *together_with} if together_with else set()
            self.best_ratio *= match.comparison.ratio if match.comparison else 1.0
        self.say("", event=event_of(row))
        return row


def _was_open(row: Row, new: Row) -> bool:
    """Return whether a row is what a screen, or its recipe's race, left open of a new one's."""
    if row.choice != new.choice or row.verdict is not Verdict.INCONCLUSIVE or not row.comparison:
        return False
    is_screened = row.comparison.source == "screen"
    return is_screened or (code_of(row.why) in RACES and row.together_with == new.together_with)


def settle_guilty(state: TuningState, recipe: Recipe) -> Asking[tuple[Choice, ...]]:
    """Return what the guard rejects of a recipe that it rejected, as far as there is time."""
    guilty = yield from find_guilty(
        state.history, state.recipe, recipe, lambda: state.budget.left_s > state.reserve_s
    )
    for choice in guilty:
        state.settled.add(choice.technique)
        state.say("", event=words("trying.rejected", technique=choice.label))
    return guilty


def with_attention_of(before: Profile, now: Profile) -> Profile:
    """Return a profile whose compiled models run attention on what they ran it on before.

    No one sees that in compiled code, and which kernel comes first can be asked for there as well.
    """
    known = {model.name: model for model in before.models if model.attention_backend}
    models = [
        replace(model, attention_backend=known[model.name].attention_backend)
        if model.is_compiled and not model.attention_backend and model.name in known
        else model
        for model in now.models
    ]
    return replace(now, models=tuple(models))


def progress(budget: Budget, trying: str, best_ratio: float = 1.0, *, event: str = "") -> Progress:
    """Return where a tuning is in its budget."""
    return Progress(
        trying=trying,
        done_share=min(1.0, budget.elapsed_s / budget.total_s),
        elapsed_s=budget.elapsed_s,
        left_s=max(0.0, budget.left_s),
        best_ratio=best_ratio,
        event=event,
    )
