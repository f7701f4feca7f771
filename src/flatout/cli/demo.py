"""The command `demo`."""

import time
from pathlib import Path

import click

from flatout.cli.options import language_option, seconds, show


@click.command("demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("flatout-demo"),
    show_default=True,
    help="Folder for script, photographs, reports and recipe.",
)
@click.option(
    "--budget", default="6m", callback=seconds, show_default=True, help="Time: 90s, 6m, 1h."
)
@click.option("--details", is_flag=True, help="Show every technique with its reasons.")
@language_option
def command(out: Path, budget: float, details: bool, language: str) -> int:
    """Make a starved training job from photographs, tune it, show the table.

    The script is an ordinary one, and it stays in the --out folder with its data: measure, tune
    and run it yourself.
    """
    from flatout.cli.tuning_output import ReportForm, tune_and_report
    from flatout.records.messages import messages
    from flatout.reporting.documents import ensure_writable
    from flatout.reporting.tuning.staged import Article
    from flatout.tuning.history import history_path
    from flatout.workflow.demo import make_job
    from flatout.workflow.tune import TuneOptions

    ensure_writable(out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    show(messages(language)("listing.demo", folder=out) + "\n", is_error=True)
    workload = make_job(out)
    left_s = budget - (time.monotonic() - started)
    # A demonstration on a busy machine still ends with its table, which then says so.
    options = TuneOptions(budget_s=left_s, out=out, accepts_load=True, history=history_path())
    form = ReportForm(details=details, article=Article(), language=language)
    return tune_and_report(workload, options, form)
