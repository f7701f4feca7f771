"""The command `tune`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from flatout.cli.options import (
    ScriptCommand,
    budget_option,
    json_option,
    language_option,
    names,
    out_option,
    quiet_option,
    script,
    show,
)

if TYPE_CHECKING:
    from flatout.workflow.tune import HostFinder

PROMISES = ("exact", "rounding", "precision", "training")


@click.command("tune", cls=ScriptCommand)
@budget_option("10m")
@click.option(
    "--numerics",
    type=click.Choice(PROMISES),
    default="precision",
    show_default=True,
    help="The most that a technique may do to the numbers.",
)
@out_option("flatout-out", "Folder for reports and recipe.")
@json_option
@language_option
@quiet_option
@click.option("--details", is_flag=True, help="Show every technique with its reasons.")
@click.option("--only", default="", callback=names, help="Try only these techniques: a,b.")
@click.option("--skip", default="", callback=names, help="Do not try these techniques: a,b.")
@click.option(
    "--acknowledge", default="", callback=names, help="Tune in spite of this wrong training: LP03."
)
@click.option("--accept-load", is_flag=True, help="Go on while others keep the machine busy.")
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
@script
def command(  # noqa: PLR0913, PLR0917  one argument an option
    target: str,
    arguments: tuple[str, ...],
    budget: float,
    numerics: str,
    out: Path,
    json_path: Path | None,
    language: str,
    quiet: bool,
    details: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    acknowledge: tuple[str, ...],
    accept_load: bool,
    gpus: int | None,
    ranks: int | None,
    on_ray: bool,
    hosts: int | None,
    pack: str,
    resume: bool,
    patch: bool,
) -> int:
    """Try what would help, keep what measurably does, prove it.

    SCRIPT is a Python file, file.py:name for a Task, or -m followed by a module. It runs many times
    in short trials, with one technique more at a time; what it writes is undone. Tables, plot and
    recipe go into the --out folder. Ctrl-C ends with the table so far, and --resume goes on from
    there.
    """
    from flatout.cli.tuning_output import ReportForm, tune_and_report
    from flatout.launch.workloads import parse_workload
    from flatout.records import catalogue
    from flatout.records.errors import UserError
    from flatout.records.technique import Numerics
    from flatout.tuning.history import history_path
    from flatout.tuning.script_files import find_script, shown
    from flatout.workflow.run import asked_ranks
    from flatout.workflow.tune import TuneOptions

    num_ranks = asked_ranks(gpus, ranks)
    for name in (*only, *skip):
        catalogue.technique_class(name)
    if only and set(only) <= set(skip):
        raise UserError(
            f"nothing is left to try: --only {','.join(only)} is skipped as well; "
            "name a technique in one of the two"
        )
    options = TuneOptions(
        budget_s=budget,
        numerics=Numerics(numerics),
        only=only,
        skip=skip,
        acknowledged=acknowledge,
        accepts_load=accept_load,
        ranks=num_ranks or 1,
        hosts=_host_finder(hosts, on_ray=on_ray, accept_load=accept_load),
        pack=pack,
        resume=resume,
        out=out,
        history=history_path(),
    )
    form = ReportForm(json_path=json_path, details=details, language=language, is_quiet=quiet)
    workload = parse_workload(target, arguments)
    script = find_script(workload) if patch else None
    if patch and script is None:
        raise UserError(f"--patch needs the file of a script, and {target} has none here")
    code = tune_and_report(workload, options, form)
    if script and code == 0:
        _write_patch(Path(shown(script, workload)), out, language)
    return code


def _host_finder(hosts: int | None, *, on_ray: bool, accept_load: bool) -> "HostFinder | None":
    from functools import partial

    from flatout.records.errors import UserError

    if hosts and not on_ray:
        raise UserError("--hosts needs --ray, which finds the hosts")
    if not on_ray:
        return None
    if accept_load:
        raise UserError("--ray takes hosts without other work: leave --accept-load out")
    from flatout.workflow.ray_trials import pair_hosts_on_ray

    return partial(pair_hosts_on_ray, most=hosts)


def _write_patch(script: Path, out: Path, language: str) -> None:
    from flatout.records.messages import messages
    from flatout.reporting.documents import write_text
    from flatout.workflow.patch import patch
    from flatout.workflow.recipe_files import read_recipe

    made = patch(read_recipe(out / "recipe.toml"), script)
    write_text(made.diff, out / "recipe.diff")
    name = "tuning.patch_without" if made.left_out else "tuning.patch"
    about = {"path": str(out / "recipe.diff"), "names": ", ".join(made.left_out)}
    show(messages(language)(name, **about) + "\n")
