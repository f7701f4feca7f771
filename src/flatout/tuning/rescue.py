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
from flatout.records.live import Progress
from flatout.records.messages import named, words
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics, name_of
from flatout.records.trial import Outcome, Trial
from flatout.tuning.experiments import Asking, MachineBusyError, TrialHistory
from flatout.tuning.pairs import ended_with
from flatout.tuning.ranking import Search
from flatout.tuning.state import progress


@dataclass(slots=True, kw_only=True)
class RescuedBaseline:
    """What was tried to make a script run."""

    history: TrialHistory
    tell: Callable[[str], None]
    may_go_on: Callable[[], bool]
    first: Trial
    """The unchanged script's trial, which failed."""
    recipe: Recipe = Recipe()
    trial: Trial | None = None
    """The trial that ran, if any did."""
    refused: dict[str, str] = field(default_factory=dict)
    """Techniques that cannot act here, with the reason."""
    tried: list[tuple[Choice, Trial]] = field(default_factory=list)
    ran_out: bool = False
    """Whether there was no time for the rest of the ladder."""

    @property
    def runs(self) -> bool:
        """Whether the script runs with the recipe."""
        return self.trial is not None

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
            self._note_refused(trial)
            if trial.outcome not in (Outcome.OK, Outcome.OOM):
                continue  # this technique breaks the script: the next one goes without it
            runs = trial.outcome is Outcome.OK and trial.profile is not None
            # A rung that could not act takes nothing's place.
            acted = choice.technique not in self.refused
            self.recipe = self._allowed(recipe if acted or runs else self.recipe)
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
            if trial.outcome is Outcome.OK and trial.profile is not None:
                self.recipe, self.trial = without, trial

    def notes(self) -> list[str]:
        """Return what a reader of the table must know."""
        unchanged = words("rescue.unchanged", message=self.first.message)
        if not self.recipe.choices:
            return [unchanged, words("rescue.once_more")]
        label = self.recipe.label
        numerics = [catalogue.technique_class(name).numerics for name in self.recipe.names]
        promise = max(numerics, key=lambda each: each.rank, default=Numerics.EXACT)
        return [
            unchanged,
            words("rescue.baseline", recipe=label),
            words("rescue.unproven", recipe=label, promise=promise.value),
        ]

    def rows(self) -> tuple[Row, ...]:
        """Return a row for each technique that was tried."""
        return tuple(_row(choice, trial, self.recipe) for choice, trial in self.tried)

    def _note_refused(self, trial: Trial) -> None:
        for applied in trial.not_applied:
            if applied.status != "unseen":
                self.refused[applied.technique] = applied.why

    def _allowed(self, recipe: Recipe) -> Recipe:
        kept = tuple(c for c in recipe.choices if c.technique not in self.refused)
        return replace(recipe, choices=kept)


def make_it_run(
    history: TrialHistory, search: Search, first: Trial, tell: Callable[[Progress], None]
) -> Asking[RescuedBaseline]:
    """Try techniques until the script runs; at most half of the time goes into that."""
    budget = history.budget
    tell(progress(budget, "", event=words("trying.failed", message=first.message)))
    rescue = RescuedBaseline(
        history=history,
        tell=lambda text: tell(progress(budget, text)),
        may_go_on=lambda: budget.left_s > budget.total_s / 2,
        first=first,
    )
    yield from rescue.climb(rungs_for(search))
    if not rescue.runs:
        tried = ", ".join(choice.label for choice, _ in rescue.tried) or "nothing"
        more = "there was no time for more, give a larger --budget; " if rescue.ran_out else ""
        raise UserError(
            f"{first.message}; tried one on top of the other, and it still does not run: {tried}; "
            f"{more}take a smaller batch, or see what 'flatout plan' says"
        )
    yield from rescue.shed()
    tell(progress(budget, "", event=words("trying.runs", recipe=rescue.recipe.label)))
    return rescue


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
    history: TrialHistory, search: Search, first: Trial, tell: Callable[[Progress], None]
) -> Asking[RescuedBaseline | None]:
    """Try a script whose own workers died or hang once more with half of them; None if it cannot.

    Where that fails too, the first trial that is returned says so.
    """
    fewer = half_of_own_workers(first.details)
    if fewer is None or history.budget.left_s <= 0 or not _may_try(fewer.names[0], search):
        return None
    budget = history.budget
    tell(progress(budget, "", event=words("trying.failed", message=first.message)))
    rescue = RescuedBaseline(
        history=history,
        tell=lambda _text: tell(progress(budget, words("trying.again", recipe=fewer.label))),
        may_go_on=lambda: True,
        first=first,
        recipe=replace(fewer, choices=()),
    )
    yield from rescue.climb(iter(fewer.choices))
    if not rescue.runs:
        (_, again), *_ = rescue.tried
        ending = again.message or named("outcome", again.outcome.value)
        about = {"message": first.message, "recipe": fewer.label, "ending": ending}
        rescue.first = replace(first, message=words("rescue.again", **about))
    return rescue


def _may_try(name: str, search: Search) -> bool:
    return name not in search.skip and (not search.only or name in search.only)


def rungs_for(search: Search) -> Iterator[Choice]:
    """Yield the techniques that may be tried here, the cheapest first.

    Those that change the training come last.
    """
    has_device = search.machine.device.kind != "cpu"
    found = [(x, rescue) for x in catalogue.declaring("rescues") for rescue in x.rescues]
    found.sort(key=lambda each: (each[0].numerics is Numerics.TRAINING, each[1].cost))
    for kind, rescue in found:
        allowed = _may_try(name_of(kind), search) and search.ceiling.allows(kind.numerics)
        if allowed and (has_device or not rescue.needs_device):
            yield Choice(technique=name_of(kind), settings=rescue.settings)


def _row(choice: Choice, trial: Trial, recipe: Recipe) -> Row:
    ran = trial.outcome is Outcome.OK and trial.profile is not None
    refusals = {a.technique: a for a in trial.not_applied if a.status != "unseen"}
    refused = refusals.get(choice.technique)
    why: str = words("row.needed" if choice in recipe.choices else "row.not_needed")
    verdict = Verdict.KEPT if choice in recipe.choices else Verdict.FAILED
    if refused is not None:
        why = refused.why
        verdict = Verdict.FAILED if refused.status == "failed" else Verdict.NOT_APPLICABLE
    elif not ran and choice not in recipe.choices:
        why = ended_with(trial)
    return Row(
        choice=choice,
        numerics=catalogue.technique_class(choice.technique).numerics.value,
        verdict=verdict,
        on_top_of=tuple(name for name in trial.recipe.names if name != choice.technique),
        loss_check=LossCheck(status="skipped", why=words("row.does_not_run")),
        why=why,
    ).seen(trial.profile)
