"""The command `techniques`."""

from pathlib import Path

import click

from flatout.cli.options import json_option, terminal_width

SCHEMA = "flatout.techniques/1"


@click.command("techniques")
@json_option
def command(json_path: Path | None) -> int:
    """List the techniques and what each may do to the numbers.

    The promises, mildest first: exact, rounding, precision, training. 'flatout tune --numerics'
    sets the ceiling.
    """
    from flatout.records import catalogue
    from flatout.reporting.documents import write_json
    from flatout.reporting.terminal import render_techniques

    classes = {name: catalogue.technique_class(name) for name in catalogue.names()}
    click.echo(render_techniques(classes, width=terminal_width()), nl=False)
    if json_path:
        levers = [
            {
                "technique": name,
                "family": kind.family,
                "numerics": kind.numerics.value,
                "addresses": sorted(kind.addresses),
                "moves_random_stream": kind.moves_random_stream,
            }
            for name, kind in classes.items()
        ]
        write_json({"schema": SCHEMA, "techniques": levers}, json_path)
    return 0
