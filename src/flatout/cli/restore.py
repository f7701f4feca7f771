"""The command `restore`."""

from pathlib import Path

import click


@click.command("restore")
@click.option(
    "--was",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="What FOLDER was called in the trial, as in a container.",
)
@click.argument(
    "folder",
    default=".",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)
def command(folder: Path, was: Path | None) -> int:
    """Put back what a killed trial had moved aside in a folder.

    Needs nothing but FOLDER (the current one without it): the cache folder may be gone. Ends with
    exit code 1 when something could not be put back.
    """
    from flatout.launch.rollback import restore

    undone, num_used = restore(folder, was)
    for line in undone.differences:
        click.echo(f"{line}")
    if num_used:
        click.echo(f"{num_used} folders belong to a trial that still runs; left alone")
    click.echo(f"{undone.num_entries} changes undone in {folder}")
    return int(bool(undone.failed))
