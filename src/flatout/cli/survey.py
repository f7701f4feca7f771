"""The command `survey`."""

from pathlib import Path
from typing import Any

import click

from flatout.cli import INTERRUPTED
from flatout.cli import options as cli


@click.command("survey", cls=cli.ScriptCommand)
@cli.time_option("--budget", "budget_s", "10m", "Time: 90s, 10m, 1h.")
@cli.out_option("flatout-survey", "Folder for the journal of the trials.")
@cli.json_option
@cli.language_option
@cli.quiet_option
@cli.load_option
@cli.script
def command(
    target: str,
    arguments: tuple[str, ...],
    *,
    json_path: Path | None,
    language: str,
    quiet: bool,
    **asked: Any,  # fields of SurveyOptions
) -> int:
    """Show what each known method does to speed and memory here.

    The ten methods for training on one GPU that guides list, and their usual combinations, each
    alone and whether or not it helps, in pairs of fresh processes. Nothing is kept, and whether the
    training stays the same is not judged: flatout tune does that. What SCRIPT writes is undone.
    """
    from flatout.cli.tuning_output import display, show_failure
    from flatout.launch.workloads import parse_workload
    from flatout.reporting.documents import ensure_writable
    from flatout.reporting.survey import render_survey
    from flatout.tuning.policy import BaselineFailedError
    from flatout.workflow.survey import SurveyOptions, survey

    workload = parse_workload(target, arguments)
    options = SurveyOptions(**asked)
    ensure_writable(options.out)
    try:
        with display(options.budget_s, is_quiet=quiet, language=language) as tell:
            found = survey(workload, options, tell)
    except BaselineFailedError as error:
        return show_failure(error, workload, language)
    text = render_survey(found, width=cli.terminal_width(), language=language)
    cli.show_result(text, found.to_json(), json_path)
    return INTERRUPTED if found.stopped == "interrupted" else 0
