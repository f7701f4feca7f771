"""The command `watch`."""

import contextlib
import sys
from pathlib import Path

import click

from flatout.cli import options as cli


@click.command("watch")
@click.option("--once", is_flag=True, help="Show one view and end; for scripts.")
@cli.file_option(
    "--json",
    "With --once: write the view as JSON to this file, or with - to the output instead.",
    callback=cli.json_file,
)
@cli.language_option
@click.argument("run_folder", required=False, type=cli.PATH)
def command(run_folder: Path | None, once: bool, json_path: Path | None, language: str) -> int:
    """Show a running job, the GPUs and the host, live.

    Attaches to the newest running flatout job of this user, or to that of RUN_FOLDER, and ends
    with it; without a job it shows the machine until Ctrl-C. The job is not disturbed.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from flatout.records.errors import UserError
    from flatout.records.live import LiveView
    from flatout.reporting.watch import render_watch
    from flatout.workflow.watch import look_once, watch

    if json_path and not once:
        raise UserError("--json writes one view; add --once")

    def report(view: LiveView) -> str:
        return render_watch(view, width=cli.terminal_width(), language=language)

    with contextlib.suppress(KeyboardInterrupt):
        if once:
            view = look_once(run_folder)
            cli.show_result(report(view), view.to_json(), json_path)
        elif sys.stdout.isatty():  # each view over the one before
            with Live(console=Console(highlight=False), auto_refresh=False) as live:
                for view in watch(run_folder):
                    live.update(Text(report(view).rstrip("\n"), no_wrap=True), refresh=True)
        else:
            for view in watch(run_folder, waits_for_jobs=False):
                cli.show(report(view) + "\n")
                sys.stdout.flush()
    return 0
