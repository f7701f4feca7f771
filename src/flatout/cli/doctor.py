"""The command `doctor`."""

from pathlib import Path

import click

from flatout.cli import options as cli
from flatout.records.json_records import to_plain

SCHEMA = "flatout.doctor/1"


@click.command("doctor")
@cli.json_option
@cli.language_option
def command(json_path: Path | None, language: str) -> int:
    """Check everything around a training that decides how fast it runs.

    Ends with exit code 1 when something would keep a training from running where it should.
    """
    from flatout.hardware.machine import read_machine
    from flatout.records.finding import BAD
    from flatout.reporting.doctor import render_doctor
    from flatout.workflow.doctor import doctor

    machine = read_machine()
    checks = doctor(machine)
    document = {
        "schema": SCHEMA,
        "machine": to_plain(machine),
        "checks": [to_plain(check) for check in checks],
    }
    text = render_doctor(machine, checks, width=cli.terminal_width(), language=language)
    cli.show_result(text, document, json_path)
    return int(any(check.status == BAD for check in checks))
