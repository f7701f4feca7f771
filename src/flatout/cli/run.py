"""The verb `run`."""

from pathlib import Path

import click

from flatout.cli.options import ScriptCommand, script


@click.command("run", cls=ScriptCommand)
@click.option(
    "--with",
    "recipe_path",
    type=click.Path(path_type=Path),
    help="The recipe; 'flatout tune' writes one.",
)
@script
def command(target: str, arguments: tuple[str, ...], recipe_path: Path | None) -> int:
    """Train with a recipe: the real training, the unmodified script.

    The script keeps its terminal, its files and its seeds, and its exit code is flatout's.
    """
    from flatout.core.errors import UserError
    from flatout.workflow.recipes import read_recipe
    from flatout.workflow.run import run
    from flatout.workflow.workloads import parse_workload

    if recipe_path is None:
        raise UserError(
            f"run needs a recipe, as in: flatout run --with recipe.toml {target}; "
            f"'flatout tune {target}' writes one"
        )
    return run(parse_workload(target, arguments), read_recipe(recipe_path))
