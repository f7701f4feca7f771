"""When the unchanged script does not run: what makes it run becomes the baseline.

Out of memory: techniques one on top of the other until it runs, the cheapest first, by the time
they cost. A technique that could not act is left out again, and when the script runs, those it
would run without are taken back. Loader workers that died or hang: once more, with half of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from flatout.analysis.loader_faults import half_of_own_workers
from flatout.records import catalogue
from flatout.records.ablation import LossCheck, Row, Verdict
from flatout.records.errors import UserError
from flatout.records.live import Tell
from flatout.records.messages import named, words
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics, name_of
from flatout.records.trial import Outcome, Trial
from flatout.tuning.experiments import Asking, MachineBusyError, TrialHistory
from flatout.tuning.guard_checker import promise_of
from flatout.tuning.pairs import ended_with
from flatout.tuning.ranking import Search
from flatout.tuning.state import progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What everything is compared with: the script as it is, or with what it does not do without.

    That is what makes it run at all, and how it is spread over several devices.
    """

    recipe: Recipe = Recipe()
    trial: Trial
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    stopped: str = ""
    """What ended the tuning meanwhile, as `Ablation.stopped` says it."""


@dataclass(slots=True, kw_only=True)
class RescueLadder:
    """What is tried to make a script run."""

    history: TrialHistory
    tell: Callable[[str], None]
    may_go_on: Callable[[], bool]
    recipe: Recipe = Recipe()
    trial: Trial | None = None
    """The trial that ran, if any did."""
    refused: dict[str, str] = field(default_factory=dict)
    """Techniques that cannot act here, with the reason."""
    tried: list[tuple[Choice, Trial]] = field(default_factory=list)
    ran_out: bool = False
    """Whether there was no time for the rest of the ladder."""

    def climb(self, rungs: Iterator[Choice]) -> Asking[None]:
        """Add one technique after the other until a trial runs."""
        for choice in rungs:
            if choice.technique in self.refused:
                continue
            if not self.may_go_on():
                self.ran_out = True
                return
            recipe = with_rung(self.recipe, choice)
            self.tell(words("trying.fits", recipe=recipe.label))
            trial = yield from self.history.time(recipe)
            self.tried.append((choice, trial))
            refusals = [x for x in trial.not_applied if x.status != "unseen"]
            self.refused |= {x.technique: x.why for x in refusals}
            if trial.outcome not in (Outcome.OK, Outcome.OOM):
                continue  # this technique breaks the script: the next one goes without it
            runs = _runs(trial)
            # A rung that could not act takes nothing's place.
            acted = choice.technique not in self.refused
            found = recipe if acted or runs else self.recipe
            kept = tuple(x for x in found.choices if x.technique not in self.refused)
            self.recipe = replace(found, choices=kept)
            if runs:
                self.trial = trial
                return

    def shed(self) -> Asking[None]:
        """Take back what the script runs without, the dearest of the earlier techniques first."""
        for choice in self.recipe.choices[-2::-1]:
            if not self.may_go_on():
                return
            without = self.recipe.without(choice.technique)
            self.tell(words("trying.still_runs", technique=choice.technique))
            try:
                trial = yield from self.history.time(without)
            except MachineBusyError:
                return
            if _runs(trial):
                self.recipe, self.trial = without, trial

    def baseline(self, first: Trial, trial: Trial) -> Baseline:
        """Return what runs, with what a reader of the table must know of its first trial."""
        notes = [words("rescue.unchanged", message=first.message)]
        if self.recipe.choices:
            label, promise = self.recipe.label, promise_of(self.recipe).value
            notes.append(words("rescue.baseline", recipe=label))
            notes.append(words("rescue.unproven", recipe=label, promise=promise))
        else:
            notes.append(words("rescue.once_more"))
        rows = tuple(_row(choice, tried, self.recipe) for choice, tried in self.tried)
        return Baseline(recipe=self.recipe, trial=trial, rows=rows, notes=tuple(notes))


def _runs(trial: Trial) -> bool:
    return trial.outcome is Outcome.OK and trial.profile is not None


def make_it_run(
    history: TrialHistory, search: Search, first: Trial, tell: Tell
) -> Asking[Baseline]:
    """Try techniques until the script runs; at most half of the time goes into that."""
    budget = history.budget
    tell(progress(budget, "", event=words("trying.failed", message=first.message)))
    rescue = RescueLadder(
        history=history,
        tell=lambda text: tell(progress(budget, text)),
        may_go_on=lambda: budget.left_s > budget.total_s / 2,
    )
    yield from rescue.climb(rungs_for(search))
    if rescue.trial is None:
        tried = ", ".join(choice.label for choice, _ in rescue.tried) or "nothing"
        more = "there was no time for more, give a larger --budget; " if rescue.ran_out else ""
        raise UserError(
            f"{first.message}; tried one on top of the other, and it still does not run: {tried}; "
            f"{more}take a smaller batch, or see what 'flatout plan' says"
        )
    yield from rescue.shed()
    tell(progress(budget, "", event=words("trying.runs", recipe=rescue.recipe.label)))
    return rescue.baseline(first, rescue.trial)


def with_rung(recipe: Recipe, choice: Choice) -> Recipe:
    """Return the recipe with one more rung, without those that it takes the place of.

    >>> technique = Recipe(choices=(Choice(technique="optimizer_in_backward"),))
    >>> with_rung(technique, Choice(technique="offloaded_optimizer")).names
    ('offloaded_optimizer',)
    """
    kind = catalogue.technique_class(choice.technique)
    for rescue in kind.rescues:
        for name in rescue.instead_of:
            recipe = recipe.without(name)
    return recipe.plus(choice)


def retry_with_fewer_workers(
    history: TrialHistory, search: Search, first: Trial, tell: Tell
) -> Asking[Baseline]:
    """Try a script whose own workers died or hang once more with half of them, where that may help.

    Where it fails all the same, so did the trial that is returned.
    """
    fewer, budget = half_of_own_workers(first.details), history.budget
    is_allowed = fewer is not None and search.allows(fewer.names[0], Numerics.EXACT)
    if fewer is None or not is_allowed or budget.left_s <= 0:
        return Baseline(trial=first)
    tell(progress(budget, "", event=words("trying.failed", message=first.message)))
    again = words("trying.again", recipe=fewer.label)
    rescue = RescueLadder(
        history=history,
        tell=lambda _text: tell(progress(budget, again)),
        may_go_on=lambda: True,
        recipe=replace(fewer, choices=()),
    )
    yield from rescue.climb(iter(fewer.choices))
    if rescue.trial is not None:
        return rescue.baseline(first, rescue.trial)
    (_, trial), *_ = rescue.tried
    ending = trial.message or named("outcome", trial.outcome.value)
    about = {"message": first.message, "recipe": fewer.label, "ending": ending}
    return Baseline(trial=replace(first, message=words("rescue.again", **about)))


def rungs_for(search: Search) -> Iterator[Choice]:
    """Yield the techniques that may be tried here, the cheapest first.

    Those that change the training come last.
    """
    has_device = search.machine.device.kind != "cpu"
    found = [(x, rescue) for x in catalogue.declaring("rescues") for rescue in x.rescues]
    found.sort(key=lambda each: (each[0].numerics is Numerics.TRAINING, each[1].cost))
    for kind, rescue in found:
        name = name_of(kind)
        if search.allows(name, kind.numerics) and (has_device or not rescue.needs_device):
            yield Choice(technique=name, settings=rescue.settings)


def _row(choice: Choice, trial: Trial, recipe: Recipe) -> Row:
    is_needed = choice in recipe.choices
    verdict = Verdict.KEPT if is_needed else Verdict.FAILED
    why: str = words("row.needed" if is_needed else "row.not_needed")
    refusals = (a for a in trial.not_applied if a.status != "unseen")
    refused = next((a for a in refusals if a.technique == choice.technique), None)
    if refused is not None:
        why = refused.why
        verdict = Verdict.FAILED if refused.status == "failed" else Verdict.NOT_APPLICABLE
    elif not is_needed and not _runs(trial):
        why = ended_with(trial)
    return Row(
        choice=choice,
        numerics=catalogue.technique_class(choice.technique).numerics.value,
        verdict=verdict,
        on_top_of=tuple(name for name in trial.recipe.names if name != choice.technique),
        loss_check=LossCheck(status="skipped", why=words("row.does_not_run")),
        why=why,
    ).seen(trial.profile)
