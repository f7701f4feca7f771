"""The command `demo`."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click

from flatout.cli import options as cli


@click.command("demo")
@click.argument("what", type=click.Choice(["photographs", "tiling"]), default="photographs")
@cli.out_option("flatout-demo", "Folder for script, photographs, reports and recipe.")
@cli.time_option("--budget", "budget_s", "6m", "Time: 90s, 6m, 1h.")
@click.option(
    "--training",
    is_flag=True,
    help="Then a second part, as long: batch size and packed data, too, on top of the recipe.",
)
@click.option("--details", is_flag=True, help="Show every technique with its reasons.")
@cli.language_option
def command(
    what: str, out: Path, budget_s: float, training: bool, details: bool, language: str
) -> int:
    """Make a starved training job from photographs, tune it, show the table.

    The script is an ordinary one, and it stays in the --out folder with its data: measure, tune
    and run it yourself.

    `flatout demo tiling` measures what tiles do for a product, a convolution and attention on one
    core, and has no options.
    """
    from flatout.cli.tuning_output import ReportForm, tune_and_report
    from flatout.records.ablation import ablation_from_json
    from flatout.records.messages import messages
    from flatout.records.technique import Numerics
    from flatout.reporting.documents import ensure_writable, read_json
    from flatout.tuning.history import history_path
    from flatout.workflow.demo import make_job, scenarios
    from flatout.workflow.tune import TuneOptions

    if what == "tiling":
        return subprocess.run([sys.executable, scenarios() / "tiling.py"], check=False).returncode
    ensure_writable(out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    cli.show(messages(language)("listing.demo", folder=out) + "\n", is_error=True)
    workload = make_job(out)
    left_s = budget_s - (time.monotonic() - started)
    # A demonstration on a busy machine still ends with its table, which then says so.
    options = TuneOptions(budget_s=left_s, out=out, accepts_load=True, history=history_path())
    form = ReportForm(details=details, with_article=True, language=language)
    code = tune_and_report(workload, options, form)
    if code or not training:
        return code
    cli.show(messages(language)("listing.demo_training") + "\n", is_error=True)
    first = ablation_from_json(read_json(out / "ablation.json"))
    tried = {row.choice.technique for row in first.rows}
    options = replace(
        options,
        out=out / "training",
        budget_s=budget_s,
        numerics=Numerics.TRAINING,
        skip=tuple(sorted(tried.difference(first.recipe.names))),
        pack=str(workload.folder / "photographs"),
    )
    return tune_and_report(workload, options, form)
