"""What `tune` and `demo` share: tune with a display, show the table, write the reports.

`display` is a live bar on a terminal, plain lines elsewhere.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.progress import Progress as Bar
from rich.progress_bar import ProgressBar
from rich.text import Text

from flatout.cli import INTERRUPTED
from flatout.cli import options as cli
from flatout.records.ablation import Ablation
from flatout.records.live import Progress, Tell
from flatout.records.messages import ENGLISH, Messages, messages, times, words
from flatout.records.trial import Workload
from flatout.records.units import format_duration
from flatout.reporting.blocks import safe
from flatout.reporting.documents import ensure_writable, write_json, write_text
from flatout.reporting.tuning.speedup_chart import ladder_svg, staged_svg
from flatout.reporting.tuning.text import ablation_html, ablation_markdown, render_ablation
from flatout.reporting.tuning.trial import render_failure
from flatout.reporting.tuning.verdict import ResultPlace, hand_changes
from flatout.tuning.policy import BaselineFailedError
from flatout.workflow.recipe_files import write_recipe
from flatout.workflow.tune import TuneOptions, tune


@contextmanager
def display(budget_s: float, *, is_quiet: bool = False, language: str = ENGLISH) -> Iterator[Tell]:
    """Give the function that a long command tells its progress to. Writes to stderr."""
    say = messages(language)
    if is_quiet:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        yield lambda progress: _line(progress, say)
        return
    console = Console(stderr=True, highlight=False)
    trying = words("trying.starting")
    start = Progress(trying=trying, done_share=0.0, elapsed_s=0.0, left_s=budget_s)
    with Bar(Spent(bar_width=24), Words(say), console=console, transient=True) as bar:
        task = bar.add_task("", total=budget_s, now=start, at=time.monotonic())

        def tell(progress: Progress) -> None:
            if progress.event:
                console.print(safe(say.text(progress.event), say), markup=False)
            bar.update(task, now=progress, at=time.monotonic())

        yield tell


def _line(progress: Progress, say: Messages) -> None:
    """Write an event on a line of its own; mere ticks would fill a log."""
    if progress.event:
        total = format_duration(progress.elapsed_s + progress.left_s)
        where = say("trying.time", done=format_duration(progress.elapsed_s), total=total)
        known = ", ".join(filter(None, (where, _runs(progress, say))))
        cli.show(f"[{known}] {safe(say.text(progress.event), say)}\n", is_error=True)


def _runs(progress: Progress, say: Messages) -> str:
    """Return how many runs were made, "" where none was counted."""
    num_runs = progress.num_runs
    name = "trying.runs_made" if num_runs > 1 else "trying.run_made"
    return say(name, n=num_runs) if num_runs else ""


class Spent(BarColumn):
    """The share of the budget that is spent; goes on between two tells."""

    def render(self, task: Task) -> ProgressBar:
        """Return the bar at this moment."""
        spent = task.fields["now"].elapsed_s + _since(task)
        return ProgressBar(total=task.total, completed=spent, width=self.bar_width)


class Words(ProgressColumn):
    """The time left, the runs so far, the best gain, and what is being tried.

    No one knows how many runs there will be.
    """

    def __init__(self, say: Messages) -> None:
        super().__init__()
        self.say = say

    def render(self, task: Task) -> Text:
        """Return them as they are at this moment, in the language of the reports."""
        now: Progress = task.fields["now"]
        left = self.say("trying.left", time=format_duration(max(0.0, now.left_s - _since(task))))
        best = self.say.text(words("trying.best", ratio=times(now.best_ratio)))
        trying = safe(self.say.text(now.trying), self.say)
        known = filter(None, (left, _runs(now, self.say), best, trying))
        return Text(" ".join(known), overflow="ellipsis", no_wrap=True)


def _since(task: Task) -> float:
    return time.monotonic() - float(task.fields["at"])


RECIPE = "recipe.toml"
STAGES = "stages.svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportForm:
    """How a tuning is reported."""

    json_path: Path | None = None
    details: bool = False
    language: str = ENGLISH
    with_article: bool = False
    """Whether the figures of the article are put next to those that were measured."""
    is_quiet: bool = False
    """Whether no progress is shown."""


def tune_and_report(workload: Workload, options: TuneOptions, form: ReportForm) -> int:
    """Tune, print the table, write the reports; return the exit code."""
    ensure_writable(options.out)
    place = place_of(workload, options.out)
    # The table first: should the disk be full, nothing is lost. Nor is anything where no one reads
    # the table any more, as after Ctrl-C with `| tee`, or a terminal that was closed.
    with ExitStack() as at_last:
        try:
            with display(options.budget_s, is_quiet=form.is_quiet, language=form.language) as tell:
                ablation = tune(workload, options, tell)
                at_last.callback(write_reports, ablation, options.out, place, form)
        except BaselineFailedError as error:
            return show_failure(error, workload, form.language)
        text = render_ablation(
            ablation,
            place=place,
            width=cli.terminal_width(),
            details=form.details,
            language=form.language,
            with_article=form.with_article,
        )
        cli.show(text)
    pictures = "ladder.svg, stages.svg" if (options.out / STAGES).exists() else "ladder.svg"
    names = f"ladder.html, {pictures}, report.md, ablation.json, {RECIPE}"
    cli.show(messages(form.language)("tuning.files", out=options.out, names=names) + "\n")
    return INTERRUPTED if ablation.stopped == "interrupted" else 0


def show_failure(error: BaselineFailedError, workload: Workload, language: str) -> int:
    """Say why the unchanged script gave no measurement; return the exit code."""
    words, width = workload.command_line, cli.terminal_width()
    text = render_failure(error.trial, workload=words, width=width, language=language)
    cli.show(text, is_error=True)
    return 2


def place_of(workload: Workload, out: Path) -> ResultPlace:
    """Return how the user types the way to the results."""
    if workload.folder == Path.cwd():
        return ResultPlace(out=str(out))
    return ResultPlace(
        out=os.path.relpath(out, workload.folder), start_in=os.path.relpath(workload.folder)
    )


def write_reports(ablation: Ablation, out: Path, place: ResultPlace, form: ReportForm) -> None:
    """Write everything that a tuning leaves behind.

    The recipe is written when it is empty too, so that none of an earlier tuning stays there; nor
    does its picture of stages, which is drawn of a recipe that was proven.
    """
    about: dict[str, Any] = {"place": place, "language": form.language}
    changes = hand_changes(ablation.recipe, form.language)
    write_recipe(ablation.recipe, out / RECIPE)
    write_json(ablation.to_json(), out / "ablation.json")
    write_text(ablation_markdown(ablation, changes, **about), out / "report.md")
    write_text(ladder_svg(ablation, form.language), out / "ladder.svg")
    stages = staged_svg(ablation, form.language)
    if stages is not None:
        write_text(stages, out / STAGES)
    else:
        (out / STAGES).unlink(missing_ok=True)
    write_text(ablation_html(ablation, changes, **about), out / "ladder.html")
    if form.json_path:
        write_json(ablation.to_json(), form.json_path)
