"""The command `check`."""

import json
from pathlib import Path

import click

from flatout import __version__
from flatout.cli import options as cli

FORMATS = ("text", "json", "github", "sarif")


@click.command("check")
@click.option("--fix", is_flag=True, help="Write the fixes after which the numbers are the same.")
@click.option("--suggested", is_flag=True, help="With --fix: the others, too.")
@click.option("--diff", is_flag=True, help="Show all fixes as a diff; write nothing.")
@click.option("--select", default="", callback=cli.names, help="Only these codes: DL02,MEM.")
@click.option("--ignore", default="", callback=cli.names, help="Not these codes: DL02,MEM.")
@click.option(
    "--output",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="What is printed.",
)
@cli.language_option
@cli.json_option
@click.argument("paths", nargs=-1, required=True, type=cli.PATH, metavar="PATH...")
def command(  # noqa: PLR0913, PLR0917  one argument an option
    paths: tuple[Path, ...],
    fix: bool,
    suggested: bool,
    diff: bool,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    output: str,
    language: str,
    json_path: Path | None,
) -> int:
    """Find what makes trainings slow, large or wrong in their source.

    PATH is a Python file or a folder. Nothing of it is imported or run.
    """
    from flatout.records.files import BYTES, STDOUT
    from flatout.reporting.check import check_github, check_sarif, check_text
    from flatout.reporting.documents import write_json
    from flatout.workflow import check as checking

    if suggested and not fix:
        raise click.UsageError("--suggested goes with --fix; --diff shows all fixes")
    if diff and fix:
        raise click.UsageError("--diff writes nothing and --fix does; give one of them")
    found = checking.check(paths, checking.Codes(select=select, ignore=ignore))
    if fix:
        found = checking.fix(found, suggested=suggested)
    if json_path:
        write_json(found.to_json(), json_path)
    if json_path == STDOUT:
        return found.exit_code
    if diff:
        click.echo(checking.diff(found).encode(*BYTES), nl=False)
    elif output == "text":
        cli.show(check_text(found, language))
    elif output == "github":
        cli.show(check_github(found, language))
    else:
        document = check_sarif(found, __version__) if output == "sarif" else found.to_json()
        click.echo(json.dumps(document, indent=2))
    return found.exit_code
