"""The command `patch`."""

from dataclasses import replace
from pathlib import Path

import click

from flatout.cli import options as cli


@click.command("patch")
@cli.language_option
@click.argument("recipe", type=cli.PATH)
@click.argument("script", type=cli.PATH)
def command(recipe: Path, script: Path, language: str) -> int:
    """Write a recipe as a diff of the script.

    The diff goes to standard output; nothing is written or run. RECIPE is what 'flatout tune'
    wrote, SCRIPT the file it tuned.
    """
    from flatout.records.catalogue import technique_class
    from flatout.records.files import BYTES
    from flatout.records.messages import messages
    from flatout.records.recipe import Recipe
    from flatout.reporting.tuning.verdict import hand_changes
    from flatout.workflow.patch import patch
    from flatout.workflow.recipe_files import read_recipe

    say = messages(language)
    wanted = read_recipe(recipe)
    made = patch(wanted, script)
    click.echo(made.diff.encode(*BYTES), nl=False)
    if made.left_out:
        names = ", ".join(made.left_out)
        command = f"flatout run --with {recipe} {script}"
        said = say("listing.left_out", names=names, command=command)
        cli.show(f"flatout: {said}\n", is_error=True)
    # A diff cannot say what takes more than one place, such as the launch of several ranks.
    by_hand = [
        replace(choice, settings={**kind().settings(), **choice.settings})
        for choice in wanted.choices
        if choice.technique in made.left_out
        and (kind := technique_class(choice.technique)).source is None
    ]
    for label, lines in hand_changes(Recipe(choices=tuple(by_hand)), language).items():
        title = say("listing.by_hand", technique=label)
        cli.show("\n".join([title, *lines, ""]), is_error=True)
    return 0 if made.written or not made.left_out else 1
