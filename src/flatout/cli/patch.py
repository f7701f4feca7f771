"""The command `patch`."""

from pathlib import Path

import click


@click.command("patch")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("script", type=click.Path(path_type=Path))
def command(recipe: Path, script: Path) -> int:
    """Write a recipe as a diff of the script.

    The diff goes to standard output; nothing is written or run. RECIPE is what 'flatout tune'
    wrote, SCRIPT the file it tuned.
    """
    from flatout.workflow.patch import patch
    from flatout.workflow.recipe_files import read_recipe

    made = patch(read_recipe(recipe), script)
    click.echo(made.diff, nl=False)
    if made.left_out:
        names = ", ".join(made.left_out)
        click.echo(
            f"flatout: not in the diff, for want of a clear place: {names}; "
            f"'flatout run --with {recipe} {script}' has all",
            err=True,
        )
    return 0 if made.written or not made.left_out else 1
