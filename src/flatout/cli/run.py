"""The command `run`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from flatout.cli import options as cli
from flatout.records.messages import messages


@click.command("run", cls=cli.ScriptCommand)
@cli.recipe_option("The recipe; 'flatout tune' writes one.")
@cli.file_option(
    "--plan", "A plan to hold the second step against; 'flatout plan --json' writes one."
)
@click.option(
    "--on-oom",
    type=click.Choice(["stop", "adapt"]),
    default="stop",
    show_default=True,
    help="When memory runs out: end, or start again with techniques that save memory.",
)
@click.option(
    "--resume-args",
    default="",
    help="What the script is given to resume when it starts again, in one quoted text.",
)
@click.option("--gpus", type=click.IntRange(min=1), help="Train on so many GPUs of this machine.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="As --gpus, without GPUs: so many processes train together on the CPU.",
)
@click.option(
    "--zero",
    type=click.IntRange(0, 3),
    default=0,
    show_default=True,
    help="Shard over the GPUs: 2 the gradients and optimizer states, 3 the weights too.",
)
@click.option(
    "--offload",
    is_flag=True,
    help="Keep what --zero 3 shards in the host's memory, on one GPU too: slow, and fits more.",
)
@click.option(
    "--hosts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Hosts that train together, each with as many GPUs or ranks; start this on each.",
)
@click.option("--rendezvous", default="", help="HOST:PORT of the first host, which all reach.")
@cli.output_option("--slurm", "Write a batch script for sbatch instead of training.")
@click.option(
    "--ray",
    "on_ray",
    is_flag=True,
    help="Train on hosts of the Ray cluster that this machine is part of, or RAY_ADDRESS names.",
)
@cli.output_option(
    "--record",
    "Write the loss over time and the metrics that the script prints; see 'compare'.",
    "record",
)
@cli.language_option
@cli.script
def command(  # noqa: PLR0913, PLR0917  one argument an option
    target: str,
    arguments: tuple[str, ...],
    recipe_path: Path | None,
    plan_path: Path | None,
    on_oom: str,
    resume_args: str,
    gpus: int | None,
    ranks: int | None,
    zero: int,
    offload: bool,
    hosts: int,
    rendezvous: str,
    slurm_path: Path | None,
    on_ray: bool,
    record: Path | None,
    language: str,
) -> int:
    """Train with a recipe: the real training, the unmodified script.

    SCRIPT is a Python file, file.py:name for a Task, or -m followed by a module. At least one of
    --with, --plan, --gpus, --ranks, --record and --on-oom adapt has to be given. With --gpus a
    script that was written for one GPU trains on several, each with its part of every batch. The
    script keeps its terminal, its files and its seeds, and its exit code is flatout's.
    """
    from flatout.launch.workloads import parse_workload, words_of
    from flatout.records.errors import UserError
    from flatout.records.recipe import Recipe
    from flatout.reporting.documents import write_json
    from flatout.workflow.hosts import Hosts
    from flatout.workflow.recipe_files import read_recipe
    from flatout.workflow.run import (
        RunOptions,
        Sharding,
        asked_ranks,
        read_plan,
        run,
        spread_over,
    )

    spread = asked_ranks(gpus, ranks, is_here=not (slurm_path or on_ray))
    if spread is None and (hosts > 1 or rendezvous or slurm_path or on_ray or zero or offload):
        raise UserError(
            "--hosts, --rendezvous, --slurm, --ray, --zero and --offload need --gpus or --ranks"
        )
    asks = recipe_path or plan_path or record or spread
    if not asks and on_oom == "stop":
        raise UserError(
            f"run needs a recipe, as in: flatout run --with recipe.toml {target}; "
            f"'flatout tune {target}' writes one"
        )
    if on_ray and (slurm_path or rendezvous):
        raise UserError("--ray finds the hosts itself: leave out --slurm and --rendezvous")
    if slurm_path is not None:
        return _write_slurm(slurm_path, target, hosts=hosts, gpus=gpus, language=language)
    if on_ray:
        return _train_on_ray(target, hosts, {"GPU": gpus or 0, "CPU": spread or 0})
    others = Hosts(count=hosts, rendezvous=rendezvous)
    workload = parse_workload(target, arguments)
    options = RunOptions(
        keep=(lambda found: write_json(found.to_json(), record)) if record else None,
        plan=read_plan(plan_path) if plan_path else None,
        adapts=on_oom == "adapt",
        language=language,
        resume_arguments=tuple(words_of(resume_args)),
    )
    recipe = read_recipe(recipe_path, may_spread=True) if recipe_path else Recipe()
    if recipe.parallel is not None and spread is None:
        spread = recipe.parallel.world_size
    elif spread is None:
        workload = workload.under(recipe)
    if spread is not None:
        workload, recipe = spread_over(
            workload,
            recipe,
            spread,
            sharding=Sharding(zero=zero, offload=offload),
            hosts=others,
            language=language,
        )
    return run(workload, recipe, options)


def _write_slurm(path: Path, target: str, *, hosts: int, gpus: int | None, language: str) -> int:
    """Write the batch script of this very command, as it was typed."""
    from flatout.reporting.documents import write_text
    from flatout.workflow.hosts import slurm_script

    words = without_options(sys.argv[1:], ("--slurm", "--hosts", "--rendezvous"), target)
    write_text(slurm_script(target, hosts, gpus, ["flatout", *words]), path)
    cli.show(messages(language)("run.slurm", path=path) + "\n")
    return 0


def _train_on_ray(target: str, hosts: int, needs: dict[str, float]) -> int:
    """Train with this very command, as it was typed, on hosts of a Ray cluster."""
    from flatout.workflow.ray_hosts import run_on_ray

    words = without_options(sys.argv[1:], ("--hosts",), target, flags=("--ray",))
    needed = {name: number for name, number in needs.items() if number}
    return run_on_ray(words, hosts, needed)


def without_options(
    words: Sequence[str], names: Sequence[str], target: str, flags: Sequence[str] = ()
) -> list[str]:
    """Return a command without these options and their values; the script's own stay.

    >>> without_options(["run", "--slurm", "job.sh", "--gpus=2", "a.py", "--hosts", "3"],
    ...                 ("--slurm", "--hosts"), "a.py")
    ['run', '--gpus=2', 'a.py', '--hosts', '3']
    """
    own = words.index(target) if target in words else len(words)
    found, skips = [], False
    for word in words[:own]:
        if skips:
            skips = False
        elif word in names:
            skips = True
        elif word not in flags and word.partition("=")[0] not in names:
            found.append(word)
    return [*found, *words[own:]]
