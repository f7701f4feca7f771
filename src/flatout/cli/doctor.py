"""The command `doctor`."""

from pathlib import Path

import click

from flatout.cli.options import json_option, language_option, show, terminal_width
from flatout.records.json_records import to_plain

SCHEMA = "flatout.doctor/1"


@click.command("doctor")
@json_option
@language_option
def command(json_path: Path | None, language: str) -> int:
    """Check everything around a training that decides how fast it runs.

    Ends with exit code 1 when something would keep a training from running where it should.
    """
    from flatout.hardware.machine import read_machine
    from flatout.records.finding import BAD
    from flatout.reporting.documents import write_json
    from flatout.reporting.terminal import render_doctor
    from flatout.workflow.doctor import doctor

    machine = read_machine()
    checks = doctor(machine)
    show(render_doctor(machine, checks, width=terminal_width(), language=language))
    if json_path:
        document = {
            "schema": SCHEMA,
            "machine": to_plain(machine),
            "checks": [to_plain(check) for check in checks],
        }
        write_json(document, json_path)
    return int(any(check.status == BAD for check in checks))
