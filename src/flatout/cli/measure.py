"""The verb `measure`."""

from pathlib import Path

import click

from flatout.cli.options import ScriptCommand, json_option, script, seconds
from flatout.core.recipe import Recipe

PATH = click.Path(path_type=Path)


@click.command("measure", cls=ScriptCommand)
@json_option
@click.option("--html", "html_path", type=PATH, help="Write the report as one HTML file too.")
@click.option("--markdown", "markdown_path", type=PATH, help="Write the report as Markdown too.")
@click.option(
    "--lang",
    "language",
    type=click.Choice(["en", "ko"]),
    default="en",
    show_default=True,
    help="Language of the reports.",
)
@click.option("--quick", is_flag=True, help="Only the timed run, none that looks closer.")
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Fresh processes to time: with 2 or more, compare gives an interval.",
)
@click.option(
    "--limit",
    "limit_s",
    default="5m",
    callback=seconds,
    show_default=True,
    help="Time for all runs together: 90s, 10m, 1h.",
)
@click.option(
    "--with",
    "recipe_path",
    type=PATH,
    help="Measure with this recipe instead of the script as it is.",
)
@click.option(
    "--trace",
    "trace_path",
    type=PATH,
    help="Trace a few steps into this file (.json.gz or .json), or folder for TensorBoard.",
)
@script
def command(  # noqa: PLR0913, PLR0917  one argument an option
    target: str,
    arguments: tuple[str, ...],
    json_path: Path | None,
    html_path: Path | None,
    markdown_path: Path | None,
    language: str,
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
    from flatout.cli.measuring import Reports, report, telling
    from flatout.reporting.documents import ensure_writable
    from flatout.workflow import passes
    from flatout.workflow.measure import measure
    from flatout.workflow.recipes import read_recipe
    from flatout.workflow.workloads import parse_workload

    workload = parse_workload(target, arguments)
    recipe = read_recipe(recipe_path) if recipe_path else Recipe()
    reports = Reports(
        json_path=json_path, html_path=html_path, markdown_path=markdown_path, language=language
    )
    reports.ensure_writable()
    if trace_path:
        ensure_writable(trace_path if trace_path.is_dir() else trace_path.parent)
    with telling(language) as tell:
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
