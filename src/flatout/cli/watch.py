"""The command `watch`."""

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flatout.cli.options import language_option, show, terminal_width

if TYPE_CHECKING:
    from flatout.records.live import LiveView

STANDARD_OUTPUT = "-"


@click.command("watch")
@click.option("--once", is_flag=True, help="Show one view and end; for scripts.")
@click.option(
    "--json",
    "json_path",
    metavar="PATH",
    help="With --once: write the view as JSON to this file, or with - to the output instead.",
)
@language_option
@click.argument("run_folder", required=False, type=click.Path(path_type=Path))
def command(run_folder: Path | None, once: bool, json_path: str | None, language: str) -> int:
    """Show a running job, the GPUs and the host, live.

    Attaches to the newest running flatout job of this user, or to that of RUN_FOLDER, and ends
    with it; without a job it shows the machine until Ctrl-C. The job is not disturbed.
    """
    from flatout.records.errors import UserError
    from flatout.workflow.watch import look_once

    if json_path and not once:
        raise UserError("--json writes one view; add --once")
    with contextlib.suppress(KeyboardInterrupt):
        if once:
            _write(look_once(run_folder), json_path, language)
        elif sys.stdout.isatty():
            _live(run_folder, language)
        else:
            _plain(run_folder, language)
    return 0


def _write(view: "LiveView", json_path: str | None, language: str) -> None:
    from flatout.reporting.documents import finite, write_json
    from flatout.reporting.watch import render_watch

    if json_path == STANDARD_OUTPUT:
        click.echo(json.dumps(finite(view.to_json()), indent=2, allow_nan=False))
        return
    show(render_watch(view, width=terminal_width(), language=language))
    if json_path:
        write_json(view.to_json(), Path(json_path))


def _live(folder: Path | None, language: str) -> None:
    """Draw each view over the one before."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from flatout.reporting.watch import render_watch
    from flatout.workflow.watch import watch

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:

        def show(view: "LiveView") -> None:
            text = render_watch(view, width=terminal_width(), language=language)
            live.update(Text(text.rstrip("\n"), no_wrap=True), refresh=True)

        watch(folder, show)


def _plain(folder: Path | None, language: str) -> None:
    """Write the views below each other, where no terminal could be redrawn."""
    from flatout.reporting.watch import render_watch
    from flatout.workflow.watch import watch

    def write(view: "LiveView") -> None:
        show(render_watch(view, width=terminal_width(), language=language) + "\n")
        sys.stdout.flush()

    watch(folder, write, waits_for_jobs=False)
