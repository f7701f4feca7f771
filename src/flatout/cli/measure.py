"""The verb `measure`."""

from pathlib import Path

import click

from flatout.cli.options import ScriptCommand, json_option, script, terminal_width
from flatout.core.recipe import Recipe


@click.command("measure", cls=ScriptCommand)
@json_option
@click.option(
    "--with",
    "recipe_path",
    type=click.Path(path_type=Path),
    help="Measure with this recipe instead of the script as it is.",
)
@script
def command(
    target: str, arguments: tuple[str, ...], json_path: Path | None, recipe_path: Path | None
) -> int:
    """Show where the time and the memory of a training step go.

    Runs SCRIPT in a process of its own until its steps are steady, then stops it. What the script
    writes is undone. SCRIPT may be a file, file.py:name for a Task, or -m and a module.
    """
    from flatout.reporting.documents import ensure_writable, write_json
    from flatout.reporting.text import render_failure, render_profile
    from flatout.workflow.measure import measure
    from flatout.workflow.recipes import read_recipe
    from flatout.workflow.workloads import parse_workload

    workload = parse_workload(target, arguments)
    recipe = read_recipe(recipe_path) if recipe_path else Recipe()
    if json_path:
        ensure_writable(json_path.parent)
    trial = measure(workload, recipe=recipe)
    words, width = workload.command_line, terminal_width()
    if trial.profile is None:
        click.echo(render_failure(trial, workload=words, width=width), nl=False, err=True)
        return 2
    click.echo(render_profile(trial.profile, workload=words, width=width), nl=False)
    if json_path:
        write_json(trial.profile.to_json(), json_path)
    return 0
