"""The command `measure`: tell what runs, print the report, write the files."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from flatout.cli.options import (
    ScriptCommand,
    file_option,
    json_option,
    language_option,
    limit_option,
    quiet_option,
    recipe_option,
    script,
    show,
    terminal_width,
)
from flatout.records.messages import ENGLISH, Messages, messages
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.trial import Trial, Workload
from flatout.reporting.documents import ensure_file_writable, write_json, write_text
from flatout.reporting.profile.html import profile_html
from flatout.reporting.profile.text import profile_markdown
from flatout.reporting.tables import printable
from flatout.reporting.terminal import MOST_LINES, render_failure, render_partial, render_profile

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """What is written besides the terminal, in which language, and how much the terminal shows."""

    json_path: Path | None = None
    html_path: Path | None = None
    markdown_path: Path | None = None
    language: str = ENGLISH
    details: bool = False
    """Whether the terminal shows everything."""

    def ensure_writable(self) -> None:
        """Try every folder before the measurement rather than after it."""
        for path in (self.json_path, self.html_path, self.markdown_path):
            if path:
                ensure_file_writable(path)


@contextmanager
def telling(language: str, *, is_quiet: bool = False) -> Iterator[Tell]:
    """Give the function that is told what runs: a live line on a terminal, lines elsewhere."""
    if is_quiet:
        yield lambda _: None
        return
    say = messages(language)
    if not sys.stderr.isatty():
        yield lambda what: _line(_measuring(what, say))
        return
    console = Console(stderr=True, highlight=False)
    with console.status(_measuring("", say)) as status:
        yield lambda what: status.update(_measuring(what, say))


def report(trial: Trial, workload: Workload, reports: Reports) -> int:
    """Print what was measured, write the files; return the exit code."""
    words, width, language = workload.command_line, terminal_width(), reports.language
    profile = trial.profile
    if profile is None:
        text = render_failure(trial, workload=words, width=width, language=language)
        show(text, is_error=True)
        if trial.partial is not None:
            room = None if reports.details else MOST_LINES - text.count("\n") - 1
            text = render_partial(
                trial.partial, workload=words, width=width, language=language, room=room
            )
            show("\n" + text)
            _write(trial.partial, words, reports)
        return 2
    # The terminal first: should the disk be full, nothing is lost.
    details = reports.details
    show(render_profile(profile, workload=words, width=width, language=language, details=details))
    _write(profile, words, reports)
    return 0


def _write(profile: Profile, workload: str, reports: Reports) -> None:
    language = reports.language
    if reports.json_path:
        write_json(profile.to_json(), reports.json_path)
    if reports.html_path:
        text = profile_html(profile, workload=workload, language=language)
        write_text(text, reports.html_path)
    if reports.markdown_path:
        text = profile_markdown(profile, workload=workload, language=language)
        write_text(text, reports.markdown_path)


def _measuring(what: str, say: Messages) -> str:
    shown = say("progress.measuring", what=say.text(what)) if what else say("progress.start")
    return printable(shown)


def _line(text: str) -> None:
    show(text + "\n", is_error=True)


@click.command("measure", cls=ScriptCommand)
@json_option
@file_option("--html", "Write the report as one HTML file too.")
@file_option("--markdown", "Write the report as Markdown too.")
@language_option
@quiet_option
@click.option("--details", is_flag=True, help="Show everything that was measured.")
@click.option("--quick", is_flag=True, help="Only the timed run, none that looks closer.")
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Fresh processes to time: with 2 or more, compare gives an interval.",
)
@limit_option("all runs together")
@recipe_option("Measure with this recipe instead of the script as it is.")
@file_option(
    "--trace", "Trace a few steps into this file (.json.gz or .json), or folder for TensorBoard."
)
@script
def command(  # noqa: PLR0913, PLR0917  one argument an option
    target: str,
    arguments: tuple[str, ...],
    json_path: Path | None,
    html_path: Path | None,
    markdown_path: Path | None,
    language: str,
    quiet: bool,
    details: bool,
    quick: bool,
    runs: int,
    limit_s: float,
    recipe_path: Path | None,
    trace_path: Path | None,
) -> int:
    """Show where the time and the memory of a training step go.

    Runs SCRIPT in a process of its own until its steps are steady, then stops it; further runs look
    closer. What the script writes is undone. SCRIPT may be a file, file.py:name for a Task, or -m
    and a module.
    """
    from flatout.launch.workloads import parse_workload
    from flatout.reporting.documents import ensure_writable
    from flatout.tuning import passes
    from flatout.workflow.measure import measure
    from flatout.workflow.recipe_files import read_recipe

    workload = parse_workload(target, arguments)
    recipe = read_recipe(recipe_path) if recipe_path else Recipe()
    reports = Reports(
        json_path=json_path,
        html_path=html_path,
        markdown_path=markdown_path,
        language=language,
        details=details,
    )
    reports.ensure_writable()
    if trace_path:
        ensure_writable(trace_path if trace_path.is_dir() else trace_path.parent)
    with telling(language, is_quiet=quiet) as tell:
        trial = measure(
            workload,
            recipe=recipe,
            limit_s=limit_s,
            closer=() if quick else passes.NAMES,
            trace=trace_path,
            tell=tell,
            runs=runs,
        )
    return report(trial, workload, reports)
