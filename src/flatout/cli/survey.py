"""The command `survey`."""

from pathlib import Path

import click

from flatout.cli.options import (
    ScriptCommand,
    budget_option,
    json_option,
    language_option,
    out_option,
    quiet_option,
    script,
    show,
    terminal_width,
)


@click.command("survey", cls=ScriptCommand)
@budget_option("10m")
@out_option("flatout-survey", "Folder for the journal of the trials.")
@json_option
@language_option
@quiet_option
@click.option("--accept-load", is_flag=True, help="Go on while others keep the machine busy.")
@script
def command(  # noqa: PLR0913, PLR0917  one argument an option
    target: str,
    arguments: tuple[str, ...],
    budget: float,
    out: Path,
    json_path: Path | None,
    language: str,
    quiet: bool,
    accept_load: bool,
) -> int:
    """Show what each known method does to speed and memory here.

    The ten methods for training on one GPU that guides list, and their usual combinations, each
    alone and whether or not it helps, in pairs of fresh processes. Nothing is kept, and whether the
    training stays the same is not judged: flatout tune does that. What SCRIPT writes is undone.
    """
    from flatout.cli.tuning_output import INTERRUPTED, display, show_failure
    from flatout.launch.workloads import parse_workload
    from flatout.reporting.documents import ensure_file_writable, ensure_writable, write_json
    from flatout.reporting.survey import render_survey
    from flatout.tuning.policy import BaselineFailedError
    from flatout.workflow.survey import SurveyOptions, survey

    workload = parse_workload(target, arguments)
    ensure_writable(out)
    if json_path:
        ensure_file_writable(json_path)
    options = SurveyOptions(out=out, budget_s=budget, accepts_load=accept_load)
    try:
        with display(budget, is_quiet=quiet, language=language) as tell:
            found = survey(workload, options, tell)
    except BaselineFailedError as error:
        return show_failure(error, workload, language)
    show(render_survey(found, width=terminal_width(), language=language))
    if json_path:
        write_json(found.to_json(), json_path)
    return INTERRUPTED if found.stopped == "interrupted" else 0
