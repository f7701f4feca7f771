"""The commands as functions, for notebooks and scripts: `flatout.measure("train.py --epochs 3")`.

Each takes the command as it would be typed after `python`, runs it as the command line does (in
processes of its own, with the same sandbox), and returns a typed result that prints as the report
and that a notebook shows as a page.
"""

import html
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.launch.workloads import parse_workload, words_of
from flatout.records.ablation import Ablation, Contrast
from flatout.records.errors import UserError, unknown
from flatout.records.finding import SourceCheck, SourceFinding
from flatout.records.plan import Plan
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import Trial, Workload
from flatout.reporting.check import check_text
from flatout.reporting.documents import read_json
from flatout.reporting.plan import plan_html, render_plan
from flatout.reporting.profile.html import profile_html
from flatout.reporting.profile.text import render_profile
from flatout.reporting.tuning.text import ablation_html, render_ablation, render_contrast
from flatout.reporting.tuning.trial import render_failure
from flatout.reporting.tuning.verdict import HERE, hand_changes
from flatout.workflow.recipe_files import read_recipe, write_recipe

Command = str | Sequence[str]
"""As typed after `python`: one string, split as a shell does, or its words."""
RecipeOrPath = Recipe | str | Path


class Shown:
    """A result that prints as its report; a notebook shows the report's page instead."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return what a prompt and a notebook print."""
        return str(self).rstrip("\n")

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _framed(page: str) -> str:
    """Return a whole page as a part of another: its style reaches nothing around it."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="" title="flatout" style="width: 100%; '
        'height: 36em; border: 1px solid #8886; resize: vertical; overflow: auto"></iframe>'
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Measurement(Shown):
    """Where the time and the memory of a training step go."""

    workload: Workload
    trial: Trial

    @property
    def profile(self) -> Profile | None:
        """The medians over the measured steps; None where the script gave no measurement."""
        return self.trial.profile

    def __str__(self) -> str:
        words = self.workload.command_line
        if self.trial.profile is None:
            return render_failure(self.trial, workload=words)
        return render_profile(self.trial.profile, workload=words)

    def _repr_html_(self) -> str:
        if self.trial.profile is None:
            return Shown._repr_html_(self)
        return _framed(profile_html(self.trial.profile, workload=self.workload.command_line))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tuning(Shown):
    """What a tuning tried, what it kept, and the evidence."""

    ablation: Ablation

    @property
    def recipe(self) -> Recipe:
        """The techniques that were kept, with their settings."""
        return self.ablation.recipe

    def __str__(self) -> str:
        return render_ablation(self.ablation)

    def _repr_html_(self) -> str:
        changes = hand_changes(self.ablation.recipe)
        return _framed(ablation_html(self.ablation, changes, place=HERE))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryPrediction(Shown):
    """The predicted memory of a training step."""

    plan: Plan
    workload: str

    def __str__(self) -> str:
        return render_plan(self.plan, workload=self.workload)

    def _repr_html_(self) -> str:
        return _framed(plan_html(self.plan, workload=self.workload))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckedSource(Shown):
    """What the rules on source found."""

    found: SourceCheck

    @property
    def findings(self) -> tuple[tuple[str, SourceFinding], ...]:
        """Each finding with the path of its file."""
        return tuple(self.found.findings())

    def __str__(self) -> str:
        return check_text(self.found)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ComparedResults(Shown):
    """Two stored results, side by side."""

    contrast: Contrast
    baseline: str
    candidate: str

    @property
    def ratio(self) -> float:
        """Above 1 the candidate is better."""
        return self.contrast.ratio

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio; None where the results hold no repeats."""
        return self.contrast.interval

    def __str__(self) -> str:
        return render_contrast(self.contrast, baseline=self.baseline, candidate=self.candidate)


def measure(
    command: Command, *, recipe: RecipeOrPath | None = None, limit_s: float = 300.0, runs: int = 1
) -> Measurement:
    """Run a training until its steps are steady, and return where time and memory go.

    Args:
        command: The script with its arguments.
        recipe: Techniques to measure it with, or the path of a recipe.
        limit_s: Seconds of wall time for all passes.
        runs: Fresh processes to time; with two or more, `compare` gives an interval.

    Raises:
        UserError: if there is no such script, or an argument is not allowed.
    """
    from flatout.tuning import passes
    from flatout.workflow import measure as measuring

    workload = _workload(command)
    trial = measuring.measure(
        workload, recipe=_recipe(recipe), limit_s=limit_s, closer=passes.NAMES, runs=runs
    )
    return Measurement(workload=workload, trial=trial)


def tune(  # noqa: PLR0913  one keyword for each thing a caller may choose
    command: Command,
    *,
    budget_s: float = 600.0,
    numerics: str = "precision",
    out: str | Path = "flatout-out",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    acknowledged: Sequence[str] = (),
    ranks: int = 1,
) -> Tuning:
    """Try what would help, keep what measurably does, and return the evidence.

    Args:
        command: The script with its arguments.
        budget_s: Seconds of wall time.
        numerics: The most a technique may do to the numbers: exact, rounding, precision, training.
        out: Folder for the recipe and the journal.
        only: Names of the techniques to try; all that apply where empty.
        skip: Names of techniques not to try.
        acknowledged: Codes of wrong training that do not keep the script from being tuned.
        ranks: Devices to spread a script for one device over, where that is faster.

    Raises:
        UserError: if there is no such script, or an argument is not allowed.
        BaselineFailedError: if the unchanged script cannot be measured.
    """
    from flatout.tuning.history import history_path
    from flatout.workflow import tune as tuning

    promises = [each.value for each in Numerics]
    if numerics not in promises:
        raise UserError(unknown("promise", numerics, promises))
    options = tuning.TuneOptions(
        budget_s=budget_s,
        numerics=Numerics(numerics),
        only=tuple(only),
        skip=tuple(skip),
        acknowledged=tuple(acknowledged),
        ranks=ranks,
        out=Path(out),
        history=history_path(),
    )
    ablation = tuning.tune(_workload(command), options, lambda _: None)
    write_recipe(ablation.recipe, Path(out) / "recipe.toml")
    return Tuning(ablation=ablation)


def run(command: Command, *, recipe: RecipeOrPath) -> int:
    """Run the real training with a recipe, and return its exit code."""
    from flatout.workflow import run as running

    found = _recipe(recipe)
    return running.run(_workload(command).under(found), found)


def plan(
    target: str, *arguments: str, gpu: str | None = None, batch: int | None = None
) -> MemoryPrediction:
    """Predict the memory of a training step on a GPU that need not exist here.

    Args:
        target: A script, `file.py:name` of a Task, or `hf:config.json`; or a whole command.
        arguments: What the script is given, where `target` is no whole command.
        gpu: Name of the GPU; this machine's where None.
        batch: Samples in a step; those of the script where None.
    """
    from flatout.workflow import plan as planning

    # Not `Path.exists`, which raises for a name that is too long, as a whole command may be.
    is_whole = not arguments and not os.path.exists(target)  # noqa: PTH110
    words = _words(target) if is_whole else [target, *arguments]
    options = planning.PlanOptions(gpu=gpu, batch=batch)
    planned = planning.plan(words[0], tuple(words[1:]), options)
    return MemoryPrediction(plan=planned.plan, workload=shlex.join(words))


def compare(baseline: str | Path, candidate: str | Path) -> ComparedResults:
    """Compare two stored results: paths of JSON files of the same kind."""
    from flatout.workflow import compare as comparing

    contrast = comparing.compare(read_json(Path(baseline)), read_json(Path(candidate)))
    return ComparedResults(contrast=contrast, baseline=str(baseline), candidate=str(candidate))


def check(
    *paths: str | Path, select: Sequence[str] = (), ignore: Sequence[str] = ()
) -> CheckedSource:
    """Read the source of trainings, run nothing of it, and return what rules find.

    Args:
        paths: Python files and folders.
        select: Codes, or their letters, that count; all where empty.
        ignore: Those that do not.

    Raises:
        UserError: if a path does not exist or a code is unknown.
    """
    from flatout.workflow import check as checking

    codes = checking.Codes(select=tuple(select), ignore=tuple(ignore))
    return CheckedSource(found=checking.check([Path(path) for path in paths], codes))


def _workload(command: Command) -> Workload:
    words = _words(command)
    return parse_workload(words[0], tuple(words[1:]))


def _words(command: Command) -> list[str]:
    words = words_of(command) if isinstance(command, str) else list(command)
    if not words:
        raise UserError(
            "the command is empty; give it as typed after python: 'train.py --epochs 3'"
        )
    return words


def _recipe(recipe: RecipeOrPath | None) -> Recipe:
    if recipe is None:
        return Recipe()
    return recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
