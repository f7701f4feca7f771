"""The command `patch`."""

from dataclasses import replace
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
    from flatout.records.catalogue import technique_class
    from flatout.records.recipe import Recipe
    from flatout.reporting.tuning.verdict import hand_changes
    from flatout.workflow.patch import patch
    from flatout.workflow.recipe_files import read_recipe

    wanted = read_recipe(recipe)
    made = patch(wanted, script)
    click.echo(made.diff, nl=False)
    if made.left_out:
        names = ", ".join(made.left_out)
        click.echo(
            f"flatout: not in the diff, for want of a clear place: {names}; "
            f"'flatout run --with {recipe} {script}' has all",
            err=True,
        )
    # A diff cannot say what takes more than one place, such as the launch of several ranks.
    by_hand = [
        replace(choice, settings={**kind().settings(), **choice.settings})
        for choice in wanted.choices
        if choice.technique in made.left_out
        and (kind := technique_class(choice.technique)).source is None
    ]
    for change in hand_changes(Recipe(choices=tuple(by_hand)), technique_class):
        click.echo("\n".join([f"{change.label}, by hand:", *change.lines]), err=True)
    return 0 if made.written or not made.left_out else 1
