"""The command `techniques`."""

from pathlib import Path

import click

from flatout.cli import options as cli

SCHEMA = "flatout.techniques/1"


@click.command("techniques")
@cli.json_option
@cli.language_option
@click.option("--history", is_flag=True, help="Show what earlier tunings here found.")
@click.option("--forget-history", is_flag=True, help="Delete that.")
@click.argument("name", required=False, metavar="[NAME]")
def command(
    json_path: Path | None, language: str, name: str | None, *, history: bool, forget_history: bool
) -> int:
    """List the techniques and what each may do to the numbers.

    With NAME, print the page of that technique.

    The promises, mildest first: exact, rounding, precision, training. 'flatout tune --numerics'
    sets the ceiling.
    """
    if history or forget_history:
        return _history(language, is_deleted=forget_history)
    from flatout.records import catalogue
    from flatout.records.errors import UserError, unknown
    from flatout.reporting.doctor import render_techniques

    if name is not None:
        if name not in catalogue.names():
            raise UserError(unknown("technique", name, catalogue.names()))
        click.echo(cli.page("techniques", name), nl=False)
        return 0
    classes = {name: catalogue.technique_class(name) for name in catalogue.names()}
    techniques = [
        {
            "technique": name,
            "family": kind.family,
            "numerics": kind.numerics.value,
            "addresses": sorted(kind.addresses),
            "moves_random_stream": kind.moves_random_stream,
        }
        for name, kind in classes.items()
    ]
    text = render_techniques(classes, width=cli.terminal_width(), language=language)
    cli.show_result(text, {"schema": SCHEMA, "techniques": techniques}, json_path)
    return 0


def _history(language: str, *, is_deleted: bool) -> int:
    """Show what tunings on this machine found, or delete it."""
    from flatout.records.messages import messages
    from flatout.reporting.doctor import render_history
    from flatout.tuning.history import history_path, read_history

    path = history_path()
    if is_deleted:
        was_there = path.exists()
        path.unlink(missing_ok=True)
        name = "forgotten" if was_there else "nothing_to_forget"
        cli.show(messages(language)(f"listing.{name}", path=path) + "\n")
        return 0
    cli.show(
        render_history(read_history(path), path, width=cli.terminal_width(), language=language)
    )
    return 0
