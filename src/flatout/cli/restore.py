"""The command `restore`."""

from pathlib import Path

import click

from flatout.cli import options as cli


@click.command("restore")
@click.option(
    "--was",
    type=cli.PATH,
    metavar="PATH",
    help="What FOLDER was called in the trial, as in a container.",
)
@cli.language_option
@click.argument(
    "folder",
    default=".",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)
def command(folder: Path, was: Path | None, language: str) -> int:
    """Put back what a killed trial had moved aside in a folder.

    Needs nothing but FOLDER (the current one without it): the cache folder may be gone. Ends with
    exit code 1 when something could not be put back.
    """
    from flatout.launch.rollback import restore
    from flatout.records.messages import messages

    say = messages(language)
    undone, num_used = restore(folder, was)
    for line in undone.differences:
        cli.show(f"{say.text(line)}\n")
    if num_used:
        cli.show(say("listing.still_runs", n=num_used) + "\n")
    cli.show(say("listing.restored", n=undone.num_entries, folder=folder) + "\n")
    return int(bool(undone.failed))
