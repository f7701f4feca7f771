"""The command `measure`: tell what runs, print the report, write the files."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from flatout.cli import options as cli
from flatout.records.messages import Messages, messages
from flatout.records.recipe import Recipe
from flatout.records.trial import Trial
from flatout.reporting.documents import write_json, write_text
from flatout.reporting.profile.html import profile_html
from flatout.reporting.profile.text import (
    MOST_LINES,
    profile_markdown,
    render_partial,
    render_profile,
)
from flatout.reporting.tables import printable
from flatout.reporting.tuning.trial import render_failure

Tell = Callable[[str], None]


@contextmanager
def telling(language: str, *, is_quiet: bool = False) -> Iterator[Tell]:
    """Give the function that is told what runs: a live line on a terminal, lines elsewhere."""
    if is_quiet:
        yield lambda _: None
        return
    say = messages(language)
    if not sys.stderr.isatty():
        yield lambda what: cli.show(_measuring(what, say) + "\n", is_error=True)
        return
    console = Console(stderr=True, highlight=False)
    with console.status(_measuring("", say)) as status:
        yield lambda what: status.update(_measuring(what, say))


def _show(trial: Trial, form: Mapping[str, Any], *, details: bool) -> None:
    """Print what was measured; else why nothing was, and what was seen until then."""
    width = cli.terminal_width()
    if trial.profile is not None:
        cli.show(render_profile(trial.profile, width=width, details=details, **form))
        return
    text = render_failure(trial, width=width, **form)
    cli.show(text, is_error=True)
    if trial.partial is not None:
        room = None if details else MOST_LINES - text.count("\n") - 1
        cli.show("\n" + render_partial(trial.partial, width=width, room=room, **form))


def _measuring(what: str, say: Messages) -> str:
    shown = say("progress.measuring", what=say.text(what)) if what else say("progress.start")
    return printable(shown)


@click.command("measure", cls=cli.ScriptCommand)
@cli.json_option
@cli.output_option("--html", "Write the report as one HTML file too.")
@cli.output_option("--markdown", "Write the report as Markdown too.")
@cli.language_option
@cli.quiet_option
@click.option("--details", is_flag=True, help="Show everything that was measured.")
@click.option("--quick", is_flag=True, help="Only the timed run, none that looks closer.")
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Fresh processes to time: with 2 or more, compare gives an interval.",
)
@cli.time_option("--limit", "limit_s", "5m", "Time for all runs together: 90s, 10m, 1h.")
@cli.recipe_option("Measure with this recipe instead of the script as it is.")
@cli.file_option(
    "--trace", "Trace a few steps into this file (.json.gz or .json), or folder for TensorBoard."
)
@cli.script
def command(  # noqa: PLR0913  one argument an option
    target: str,
    arguments: tuple[str, ...],
    *,
    json_path: Path | None,
    html_path: Path | None,
    markdown_path: Path | None,
    language: str,
    details: bool,
    quiet: bool,
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
    form = {"workload": workload.command_line, "language": language}
    _show(trial, form, details=details)  # first: should the disk be full, nothing is lost
    profile = trial.profile or trial.partial
    if profile and json_path:
        write_json(profile.to_json(), json_path)
    if profile and html_path:
        write_text(profile_html(profile, **form), html_path)
    if profile and markdown_path:
        write_text(profile_markdown(profile, **form), markdown_path)
    return 0 if trial.profile else 2
