"""The command `plan`."""

import shlex
from pathlib import Path
from typing import Any

import click

from flatout.cli import options as cli

SCHEMA = "flatout.plan/1"


@click.command("plan", cls=cli.ScriptCommand)
@click.option(
    "--gpu",
    help="The GPU to plan for: h200, h100, a100-80, a100-40, l40s, l4, a10g, t4, rtx4090, "
    "rtx3090, mi300x, or its memory, as 24GiB. Without it this machine's own.",
)
@click.option("--batch", type=int, help="Samples of a micro-batch instead of the script's own.")
@click.option("--fit", is_flag=True, help="Find the largest batch that fits.")
@click.option("--gpus", type=int, default=1, show_default=True, help="GPUs of each host.")
@click.option("--hosts", type=int, default=1, show_default=True, help="Hosts that train together.")
@cli.file_option(
    "--profile",
    "A profile of this training on one GPU, to calibrate the times of ways to spread it; "
    "'flatout measure --json' writes one.",
)
@cli.file_option(
    "--links",
    "Bandwidth between the ranks of this host: read from here, or measured and written where "
    "there is no such file.",
)
@cli.recipe_option("Plan with this recipe instead of the script as it is.")
@cli.json_option
@cli.language_option
@cli.output_option("--html", "Write the report as one HTML file too.")
@cli.output_option("--snapshot", "Write the predicted run for torch's memory viewer (pickle).")
@cli.script
def command(  # noqa: PLR0913  one argument an option
    target: str,
    arguments: tuple[str, ...],
    *,
    profile_path: Path | None,
    links_path: Path | None,
    recipe_path: Path | None,
    json_path: Path | None,
    language: str,
    html_path: Path | None,
    snapshot_path: Path | None,
    **asked: Any,  # fields of PlanOptions
) -> int:
    """Say whether a training step fits a GPU that you do not have.

    And what would make it fit. Nothing is trained, and no GPU is needed. The numbers of memory were
    compared with an H200, and with no other GPU. With --gpus or --hosts it says first how many GPUs
    are worth it, and which way to spread the training is the fastest. SCRIPT may be a file,
    file.py:name for a Task or a function that returns one, or hf:config.json of transformers. Ends
    with exit code 1 when it does not fit.
    """
    from flatout.records.messages import messages
    from flatout.records.recipe import Recipe
    from flatout.records.secrets import hide_in_words
    from flatout.reporting.documents import write_text
    from flatout.reporting.plan import plan_html, render_plan
    from flatout.workflow.plan import PlanOptions, plan, read_links, read_profile
    from flatout.workflow.recipe_files import read_recipe

    def tell(what: str) -> None:
        click.echo(f"flatout: {messages(language).text(what)}", err=True)

    options = PlanOptions(
        **asked,
        recipe=read_recipe(recipe_path) if recipe_path else Recipe(),
        profile=read_profile(profile_path) if profile_path else None,
        links=read_links(links_path, asked["gpus"], tell) if links_path else None,
    )
    planned = plan(target, arguments, options, tell)
    words = shlex.join([target, *hide_in_words(arguments)])
    found = planned.plan
    report = {"workload": words, "gpu": options.gpu or "", "language": language}
    text = render_plan(found, width=cli.terminal_width(), **report)
    cli.show_result(text, {"schema": SCHEMA} | found.to_json(), json_path)
    if html_path:
        write_text(plan_html(found, **report), html_path)
    if snapshot_path:
        planned.write_snapshot(snapshot_path)
    if found.advice is not None:
        return int(found.advice.ranks is None or found.advice.ranks > found.advice.asked)
    return int(not found.fits)
