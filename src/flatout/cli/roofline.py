"""The command `roofline`."""

from pathlib import Path

import click

from flatout.cli import options as cli
from flatout.records.recipe import Recipe


@click.command("roofline", cls=cli.ScriptCommand)
@cli.json_option
@cli.language_option
@cli.output_option("--svg", "Write the plot as SVG to this file.")
@cli.output_option("--markdown", "Write the report as Markdown too.")
@cli.time_option("--limit", "limit_s", "5m", "Time for everything together: 90s, 10m, 1h.")
@cli.recipe_option("Look at the script with this recipe instead of as it is.")
@click.argument("target", metavar="[SCRIPT", required=False)
@click.argument("arguments", metavar="ARGUMENTS...]", nargs=-1, type=click.UNPROCESSED)
def command(  # noqa: PLR0913, PLR0917  one argument an option
    target: str | None,
    arguments: tuple[str, ...],
    json_path: Path | None,
    language: str,
    svg_path: Path | None,
    markdown_path: Path | None,
    limit_s: float,
    recipe_path: Path | None,
) -> int:
    """Show peak throughput, and how close each matrix product gets.

    Without SCRIPT the ceilings of the device alone: matrix products in each arithmetic, memory,
    copies. With it every distinct product of a training step, timed alone, against them.
    """
    from flatout.cli.measure import telling
    from flatout.launch.workloads import parse_workload
    from flatout.reporting.documents import write_text
    from flatout.reporting.roofline import render_roofline, roofline_markdown, roofline_svg
    from flatout.workflow.recipe_files import read_recipe
    from flatout.workflow.roofline import roofline

    workload = parse_workload(target, arguments) if target else None
    recipe = read_recipe(recipe_path) if recipe_path else Recipe()
    with telling(language) as tell:
        found = roofline(workload, recipe=recipe, limit_s=limit_s, tell=tell)
    text = render_roofline(found, width=cli.terminal_width(), language=language)
    cli.show_result(text, found.to_json(), json_path)
    if svg_path:
        write_text(roofline_svg(found, language), svg_path)
    if markdown_path:
        write_text(roofline_markdown(found, language), markdown_path)
    return 0
