"""The command `tune`."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from flatout.cli import options as cli
from flatout.records.errors import UserError

PROMISES = ("exact", "rounding", "precision", "training")


@click.command("tune", cls=cli.ScriptCommand)
@cli.time_option("--budget", "budget_s", "10m", "Time: 90s, 10m, 1h.")
@click.option(
    "--numerics",
    type=click.Choice(PROMISES),
    default="precision",
    show_default=True,
    help="The most that a technique may do to the numbers.",
)
@cli.out_option("flatout-out", "Folder for reports and recipe.")
@cli.json_option
@cli.language_option
@cli.quiet_option
@click.option("--details", is_flag=True, help="Show every technique with its reasons.")
@click.option("--only", default="", callback=cli.names, help="Try only these techniques: a,b.")
@click.option("--skip", default="", callback=cli.names, help="Do not try these techniques: a,b.")
@click.option(
    "--acknowledge",
    "acknowledged",
    default="",
    callback=cli.names,
    help="Tune in spite of this wrong training: LP03.",
)
@cli.load_option
@click.option(
    "--gpus", type=click.IntRange(min=1), help="Spread it over so many GPUs, where that is faster."
)
@click.option("--ranks", type=click.IntRange(min=1), help="As --gpus, in processes on the CPU.")
@click.option(
    "--ray",
    "on_ray",
    is_flag=True,
    help="Play pairs of trials on hosts of this kind in the Ray cluster of this machine, too.",
)
@click.option(
    "--hosts", type=click.IntRange(min=2), help="Use so many with --ray, this one among them."
)
@click.option(
    "--pack", default="", metavar="SRC", help="Pack these data first, or a sample of them."
)
@click.option("--resume", is_flag=True, help="Go on where a tuning with this --out ended.")
@click.option("--patch", is_flag=True, help="Write the recipe as a diff of the script, too.")
@cli.script
def command(  # noqa: PLR0913  one argument an option
    target: str,
    arguments: tuple[str, ...],
    *,
    numerics: str,
    json_path: Path | None,
    language: str,
    quiet: bool,
    details: bool,
    gpus: int | None,
    ranks: int | None,
    on_ray: bool,
    hosts: int | None,
    patch: bool,
    **asked: Any,  # fields of TuneOptions
) -> int:
    """Try what would help, keep what measurably does, prove it.

    SCRIPT is a Python file, file.py:name for a Task, or -m followed by a module. It runs many times
    in short trials, with one technique more at a time; what it writes is undone. Tables, plot and
    recipe go into the --out folder. Ctrl-C ends with the table so far, and --resume goes on from
    there.
    """
    from flatout.cli.tuning_output import ReportForm, tune_and_report
    from flatout.launch.workloads import parse_workload
    from flatout.records.technique import Numerics
    from flatout.tuning.history import history_path
    from flatout.tuning.script_files import find_script, shown
    from flatout.workflow.ray_trials import pair_hosts_on_ray
    from flatout.workflow.run import asked_ranks
    from flatout.workflow.tune import TuneOptions

    if hosts and not on_ray:
        raise UserError("--hosts needs --ray, which finds the hosts")
    if on_ray and asked["accepts_load"]:
        raise UserError("--ray takes hosts without other work: leave --accept-load out")
    options = TuneOptions(
        **asked,
        numerics=Numerics(numerics),
        ranks=asked_ranks(gpus, ranks) or 1,
        hosts=partial(pair_hosts_on_ray, most=hosts) if on_ray else None,
        history=history_path(),
    )
    if options.only and set(options.only) <= set(options.skip):
        raise UserError(
            f"nothing is left to try: --only {','.join(options.only)} is skipped as well; "
            "name a technique in one of the two"
        )
    form = ReportForm(json_path=json_path, details=details, language=language, is_quiet=quiet)
    workload = parse_workload(target, arguments)
    script = find_script(workload) if patch else None
    if patch and script is None:
        raise UserError(f"--patch needs the file of a script, and {target} has none here")
    code = tune_and_report(workload, options, form)
    if script and code == 0:
        _write_patch(Path(shown(script, workload)), options.out, language)
    return code


def _write_patch(script: Path, out: Path, language: str) -> None:
    from flatout.records.messages import messages
    from flatout.reporting.documents import write_text
    from flatout.workflow.patch import patch
    from flatout.workflow.recipe_files import read_recipe

    made = patch(read_recipe(out / "recipe.toml"), script)
    write_text(made.diff, out / "recipe.diff")
    name = "tuning.patch_without" if made.left_out else "tuning.patch"
    about = {"path": str(out / "recipe.diff"), "names": ", ".join(made.left_out)}
    cli.show(messages(language)(name, **about) + "\n")
