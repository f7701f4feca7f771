"""The command `container`."""

from pathlib import Path

import click

from flatout.cli import options as cli


@click.command("container")
@click.option(
    "--with",
    "--recipe",
    "recipe_path",
    type=cli.PATH,
    help="Train with this recipe; it has to lie below this folder.",
)
@click.option("--requirements", type=cli.PATH, help="Install these packages of the script's own.")
@click.option(
    "--flatout",
    "source",
    metavar="SOURCE",
    help="With a recipe: install flatout from this wheel or clone below this folder, or address.",
)
@click.option("--out", type=cli.PATH, help="Write to this file instead of the terminal.")
@cli.language_option
@click.argument("script", default="train.py")
def command(
    recipe_path: Path | None,
    requirements: Path | None,
    source: str | None,
    out: Path | None,
    script: str,
    language: str,  # of help and errors: a Dockerfile has none
) -> int:
    """Write a Dockerfile with the stack that was measured.

    torch's version and build, a compiler, the allocator, caches that last, and the command with
    enough shared memory. It is never built here.
    """
    from flatout.hardware.machine import read_machine
    from flatout.reporting.doctor import dockerfile
    from flatout.reporting.documents import write_text
    from flatout.workflow.container import stack_of, with_flatout
    from flatout.workflow.recipe_files import read_recipe

    recipe = read_recipe(recipe_path) if recipe_path else None
    stack = stack_of(
        read_machine(torch=False),
        recipe=recipe_path,
        requirements=requirements,
        script=script,
    )
    if recipe is not None:
        stack = with_flatout(stack, source, recipe)
    text = dockerfile(stack)
    if out:
        write_text(text, out)
    else:
        click.echo(text, nl=False)
    return 0
