"""The command `run`: the real training, unmodified, with a recipe.

`read_plan` is what it is held against, `next_recipes` what comes after memory ran out.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.agent.bootstrap import PARENT_VARIABLE
from flatout.agent.events import TRAINED
from flatout.hardware.machine import read_machine
from flatout.launch.trial_folders import announce
from flatout.launch.trial_process import (
    armed_environment,
    clean_up_stale_trials,
    command_of,
    compile_cache,
    find_noted,
    scratch_root,
)
from flatout.records import catalogue
from flatout.records.errors import UserError, describe_exhaustion
from flatout.records.input_files import parse_json, read_json
from flatout.records.json_records import from_plain, to_plain
from flatout.records.messages import ENGLISH, joined, messages, words
from flatout.records.parallel import (
    ParallelSpec,
    check_world,
    refit,
    script_settings,
    spec_for,
)
from flatout.records.plan import Plan, Rung
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics, hook_points_of, name_of
from flatout.records.trial import Workload
from flatout.records.trial_result import CURVE, PRINTED, CurvePoint, PrintedValue, RunRecord
from flatout.records.trial_spec import TrialSpec
from flatout.records.units import format_bytes
from flatout.tuning.ranking import Search
from flatout.tuning.rescue import rungs_for, with_rung
from flatout.tuning.trials import ENTRY
from flatout.workflow.hosts import ONE_HOST, Hosts


def read_plan(path: Path) -> Plan:
    """Read the plan that `flatout plan --json` wrote, but for the ways to spread the training."""
    try:
        plan = from_plain(Plan, read_json(path) | {"parallel": [], "advice": None})
        _fitting(plan)  # a label that is none is refused here, and not when memory has run out
    except OSError as error:
        raise UserError(
            f"cannot read the plan {path}: {error.strerror}; 'flatout plan --json' writes one"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path} is no plan ({type(error).__name__}: {error}); 'flatout plan --json' writes one"
        ) from None
    return plan


def _fitting(plan: Plan) -> list[tuple[Rung, Recipe]]:
    """Return the ways of a plan that fit and train the same, each with its techniques."""
    found = []
    for rung in plan.ladder:
        if rung.fits and rung.choices and not rung.changes_training:
            recipe = Recipe(choices=tuple(map(Choice.from_label, rung.choices)))
            with contextlib.suppress(UserError):  # a smaller batch is the script's business
                catalogue.build(recipe)
                found.append((rung, recipe))
    return found


def next_recipes(recipe: Recipe, plan: Plan | None) -> Iterator[Recipe]:
    """Yield what to try after a recipe ran out of memory, each more saving than the one before.

    The plan's ways that fit come first; then flatout's own ladder, one technique on top of the
    other.
    """
    for _rung, way in _fitting(plan) if plan else ():
        found = recipe
        for choice in way.choices:
            found = found.plus(choice)
        if found != recipe:
            yield found
    search = Search(machine=read_machine(torch=False), ceiling=Numerics.PRECISION)
    for choice in rungs_for(search):
        if choice not in recipe.choices:
            recipe = with_rung(recipe, choice)
            yield recipe


def tell(text: str, language: str = ENGLISH) -> None:
    """Say something alongside the script's own output."""
    sys.stderr.write(f"flatout: {messages(language).text(text)}\n")
    sys.stderr.flush()


def tell_exhaustion(where: str, plan: Plan | None, target: str, language: str = ENGLISH) -> None:
    """Say where memory ran out, and what would have fit."""
    tell(words("run.out_of_memory", where=where), language)
    said = words("run.no_way")
    if plan is None:
        said = words("run.no_plan", target=target)
    elif plan.fits:
        size = format_bytes(plan.reserved.bytes)
        said = words("run.should_fit", size=size, device=plan.device)
    elif ways := _fitting(plan)[:3]:
        said = words("run.ways", ways=joined(*(_label(rung) for rung, _ in ways)))
    tell(said, language)


def _label(rung: Rung) -> str:
    saved, ratio = format_bytes(rung.saved_bytes), f"{rung.time_ratio:.2f}"
    return words("run.way", techniques=" + ".join(rung.choices), saved=saved, ratio=ratio)


REPLACED_HOOK_POINTS = frozenset({"epoch", "batches", "model", "forward", "backward", "optimizer"})
"""Where no technique acts on a Task that is spread over ranks."""
KILLED = 128 + 9
"""Exit code that a shell gives for signal 9, and so does `run`."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers, containers and people tell a training with; many save a checkpoint then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run does alongside the training."""

    plan: Plan | None = None
    """Held against the second step."""
    adapts: bool = False
    """Whether it starts again, with techniques that save memory, when that ran out."""
    resume_arguments: tuple[str, ...] = ()
    """What the script is given alongside its own arguments when it starts again."""
    language: str = ENGLISH
    """Of what is said on stderr."""
    keep: Callable[[RunRecord], None] | None = None
    """Given the loss over time and the printed metrics, after each time the script ran."""


def run(workload: Workload, recipe: Recipe, options: RunOptions = RunOptions()) -> int:
    """Train to the end with the recipe and return the script's exit code.

    The script owns the terminal, its files and its seeds: nothing is overlaid, rolled back or
    stopped. Techniques that could not be applied are named on stderr by the child itself.
    """
    clean_up_stale_trials()
    code, noted = _train(workload, recipe, options)
    if noted is None:
        return code
    language = options.language
    where = describe_exhaustion(noted)
    tell_exhaustion(where, options.plan, workload.command_line, language)
    if not options.adapts:
        tell(words("run.can_adapt"), language)
        return code
    again = replace(workload, arguments=(*workload.arguments, *options.resume_arguments))
    for adapted in next_recipes(recipe, options.plan):
        tell(words("run.starting_again", recipe=adapted.label), language)
        resumes = words("run.resumes_as", command=again.command_line)
        tell(resumes if options.resume_arguments else words("run.from_the_beginning"), language)
        code, noted = _train(again, adapted, options)
        if noted is None:
            return code
        tell(words("run.out_of_memory", where=describe_exhaustion(noted)), language)
    tell(words("run.nothing_left"), language)
    return code


def asked_ranks(gpus: int | None, ranks: int | None, *, is_here: bool = True) -> int | None:
    """Return the processes that train together on a host; None where that was not asked for.

    GPUs have a process each; `ranks` are processes without.
    """
    if gpus is None:
        return ranks
    if ranks is not None:
        raise UserError("--gpus and --ranks are the same choice: give one of them")
    found = len(read_machine(torch=False).devices) if is_here else gpus
    if found < gpus:
        raise UserError(
            f"--gpus {gpus}: this machine has {found}; --ranks {gpus} trains on the CPU"
        )
    return gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What the command line says of it."""

    zero: int = 0
    offload: bool = False


NOTHING_SHARDED = Sharding()


def spread_over(
    workload: Workload,
    recipe: Recipe,
    ranks: int,
    *,
    sharding: Sharding = NOTHING_SHARDED,
    hosts: Hosts = ONE_HOST,
    language: str = ENGLISH,
) -> tuple[Workload, Recipe]:
    """Return what trains a script for one device, or a Task, in ranks: so many on each host."""
    ranks *= hosts.count
    os.environ.update(hosts.environment)
    spec, zero, offload = recipe.parallel, sharding.zero, sharding.offload
    if spec is not None and sharding != NOTHING_SHARDED:
        flag = f"--zero {zero}" if zero else "--offload"
        raise UserError(f"{flag}: the recipe's table [parallel] has a zero of its own")
    if offload and zero != 3:
        raise UserError("--offload keeps in the host's memory what --zero 3 shards: give both")
    spec = spec or spec_for(ranks, zero, offload=offload)
    if workload.is_task:
        return _spread_task(workload, recipe, ranks, spec, language)
    if ranks == 1 and not spec.offload:
        return workload, replace(recipe, parallel=None)
    check_world(spec, ranks)
    settings = script_settings(spec)
    if settings["zero"] == 1:
        raise UserError("--zero 1 is offered for a Task only: --zero 2 saves more, sends as much")
    choice = Choice(technique=catalogue.setter_of("ranks"), settings=settings)
    return replace(workload, ranks=ranks), replace(recipe, parallel=None).plus(choice)


def _spread_task(
    workload: Workload, recipe: Recipe, ranks: int, spec: ParallelSpec, language: str
) -> tuple[Workload, Recipe]:
    """Return what trains a Task: the table as it is, or for the ranks there are now."""
    if spec.offload:
        raise UserError("offload is for scripts: what a Task's ranks shard stays on the GPUs")
    for technique in catalogue.build(recipe):
        acting = hook_points_of(technique) & REPLACED_HOOK_POINTS
        if acting:
            raise UserError(
                f"{name_of(technique)} acts on the {min(acting)}, which is spread over ranks: leave"
                " it out; checkpointing and compile are keys of [parallel]"
            )
    if spec.world_size != ranks:
        folder = workload.folder / spec.checkpoint
        if not (spec.checkpoint and any(folder.glob("step-*"))):
            check_world(spec, ranks)
        spec = refit(spec, ranks)
        tell(words("run.other_ranks", n=str(ranks), spec=spec.label), language)
    spread = replace(workload, ranks=ranks, is_spread=True, restarts=spec.restarts)
    return spread, replace(recipe, parallel=spec)


def _train(
    workload: Workload, recipe: Recipe, options: RunOptions
) -> tuple[int, Mapping[str, Any] | None]:
    """Run the script once; return its exit code and what it noted if memory ran out."""
    environment: Mapping[str, str] = dict(os.environ)
    for technique in catalogue.build(recipe):
        environment = technique.environment(environment)
    environment = with_compile_cache(environment, workload)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=scratch_root()))
    try:
        announce(folder, "run", workload.command_line)
        spec_path = folder / "child.json"
        spec_path.write_text(json.dumps(to_plain(_spec(recipe, folder, options))), encoding="utf-8")
        armed = armed_environment(environment, spec_path) | {PARENT_VARIABLE: str(os.getpid())}
        began_s = time.monotonic()
        with _signals_passed_on() as pass_to:
            child = subprocess.Popen(command_of(workload), cwd=workload.folder, env=armed)
            pass_to(child)
            code = child.wait()
            code = code if code >= 0 else 128 - code  # a shell names a signal by a number above 128
        if options.keep is not None:
            record = RunRecord(
                command=workload.command_line,
                recipe=recipe.label,
                exit_code=code,
                seconds=time.monotonic() - began_s,
                points=tuple(from_plain(CurvePoint, row) for row in _rows(folder, CURVE)),
                printed=_printed(folder),
            )
            options.keep(record)
        if code == KILLED:
            tell(words("run.killed"), options.language)
        # A process that left without its exit handlers still has its status there.
        if (
            code == 0
            and recipe.choices
            and not [*folder.glob(f"{TRAINED}-*"), *folder.glob("status-*")]
        ):
            tell(words("run.no_step", target=workload.target), options.language)
        return code, find_noted(folder, "oom") if code else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows that the first rank's training process left, the longest file of several."""
    paths = sorted(folder.glob(f"{name}-0-*.jsonl"), key=lambda path: path.stat().st_size)
    lines = paths[-1].read_text(encoding="utf-8").splitlines() if paths else []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last one, of a process that was killed
            found.append(parse_json(line))
    return found


def _printed(folder: Path) -> dict[str, tuple[PrintedValue, ...]]:
    rows = _rows(folder, PRINTED)
    return {
        name: tuple(from_plain(PrintedValue, row) for row in rows if row["name"] == name)
        for name in dict.fromkeys(row["name"] for row in rows)
    }


def with_compile_cache(environment: Mapping[str, str], workload: Workload) -> Mapping[str, str]:
    """Return the environment with the compile cache that the trials of this script fill.

    So a run starts warm after a tuning, and the next run after this one.
    """
    return {"TORCHINDUCTOR_CACHE_DIR": str(compile_cache(workload)), **environment}


def _spec(recipe: Recipe, folder: Path, options: RunOptions) -> TrialSpec:
    return TrialSpec(
        entry=ENTRY,
        mode="run",
        recipe=recipe,
        status_folder=str(folder),
        plan=_for_child(options.plan) if options.plan else None,
        records_run=options.keep is not None,
        says=messages(options.language).family("run.training"),
        language=options.language,
        prefix=sys.prefix,
    )


def _for_child(plan: Plan) -> dict[str, Any]:
    """Return what the training process compares itself with, at the peak of a steady step."""
    workspace = plan.components.get("workspace")
    return {
        "device": plan.device,
        "allocated": plan.allocated.bytes,
        "reserved": plan.reserved.bytes,
        "workspace": workspace.bytes if workspace else 0,
    }


@contextlib.contextmanager
def _signals_passed_on() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Pass signals on to the script that is named, those from before it was named too.

    A signal that ended flatout here would end the training, while it saves its checkpoint.
    """
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if not children:
            early.append(number)
        if number == signal.SIGINT and not _is_told_alone():
            return  # whoever sends it tells the script itself
        for child in children:
            child.send_signal(number)

    def pass_to(child: subprocess.Popen[bytes]) -> None:
        children.append(child)
        for number in early:
            child.send_signal(number)

    # What is ignored stays so (nohup): the script inherits that.
    ours = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in ours}
    try:
        yield pass_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_told_alone() -> bool:
    """Return whether an interrupt comes to this process and not to the script.

    A terminal tells all in its foreground, and `timeout` a whole group: a second interrupt would
    end a script that is saving. Only to the first process of a container no one else is known.
    """
    if os.getpid() != 1:
        return False
    with contextlib.suppress(OSError), Path("/dev/tty").open("rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) != os.getpgrp()
    return True  # there is no terminal
