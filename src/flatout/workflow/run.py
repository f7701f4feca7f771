"""The verb `run`: the real training, unmodified, with a recipe."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout import techniques
from flatout.core.exhaustion import describe_exhaustion
from flatout.core.recipe import Recipe
from flatout.core.workload import Workload
from flatout.seams.arming import PARENT_VARIABLE
from flatout.seams.jobs import announce
from flatout.seams.process import (
    armed_environment,
    command_of,
    find_noted,
    mend_leftovers,
    scratch_root,
)
from flatout.workflow.run_guard import RunPlan, next_recipes, tell, tell_exhaustion
from flatout.workflow.trials import ENTRY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

KILLED = 128 + 9
"""Exit code that a shell gives for signal 9, and so does `run`."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers, containers and people tell a training with; many save a checkpoint then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run does beside the training."""

    plan: RunPlan | None = None
    """Held against the second step."""
    adapts: bool = False
    """Whether it starts again, with levers that save memory, when that ran out."""
    resume_arguments: tuple[str, ...] = ()
    """What the script is given beside its own arguments when it starts again."""


def run(workload: Workload, recipe: Recipe, options: RunOptions = RunOptions()) -> int:
    """Train to the end with the recipe and return the script's exit code.

    The script owns the terminal, its files and its seeds: nothing is overlaid, rolled back or
    stopped. Techniques that could not be applied are named on stderr by the child itself.
    """
    mend_leftovers()
    code, noted = _train(workload, recipe, options.plan)
    if noted is None:
        return code
    tell_exhaustion(describe_exhaustion(noted), options.plan, workload.command_line)
    if not options.adapts:
        tell("with --on-oom adapt it starts again by itself, in a fresh process")
        return code
    again = replace(workload, arguments=(*workload.arguments, *options.resume_arguments))
    for adapted in next_recipes(recipe, options.plan):
        _tell_restart(again, adapted, options)
        code, noted = _train(again, adapted, options.plan)
        if noted is None:
            return code
        tell(f"out of memory {describe_exhaustion(noted)}")
    tell("nothing is left to try: take a smaller batch")
    return code


def _tell_restart(workload: Workload, recipe: Recipe, options: RunOptions) -> None:
    tell(f"starting again in a fresh process with {recipe.label}")
    if options.resume_arguments:
        tell(f"as: python {workload.command_line}")
    else:
        tell(
            "from the beginning, unless the script finds its last checkpoint by itself; "
            "--resume-args says how it resumes"
        )


def _train(
    workload: Workload, recipe: Recipe, plan: RunPlan | None
) -> "tuple[int, Mapping[str, Any] | None]":
    """Run the script once; return its exit code and what it noted if memory ran out."""
    environment: Mapping[str, str] = dict(os.environ)
    for technique in techniques.build(recipe):
        environment = technique.environment(environment)
    environment = with_compile_cache(environment, workload)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=scratch_root()))
    try:
        announce(folder, "run", workload.command_line)
        spec_path = folder / "child.json"
        spec_path.write_text(json.dumps(_child(recipe, folder, plan)), encoding="utf-8")
        armed = armed_environment(environment, spec_path) | {PARENT_VARIABLE: str(os.getpid())}
        with _signals_passed_on() as pass_to:
            child = subprocess.Popen(command_of(workload), cwd=workload.folder, env=armed)
            pass_to(child)
            code = _shells_code(child.wait())
        if code == KILLED:
            tell("the script was killed: where nobody did that, the machine ran out of memory")
        return code, find_noted(folder, "oom") if code else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_compile_cache(environment: "Mapping[str, str]", workload: Workload) -> "Mapping[str, str]":
    """Return the environment with the compile cache that the trials of this script fill.

    So a run starts warm after a tuning, and the next run after this one.
    """
    cache = scratch_root() / "compiled" / workload.name
    cache.mkdir(parents=True, exist_ok=True)
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache), **environment}


def _child(recipe: Recipe, folder: Path, plan: RunPlan | None) -> dict[str, object]:
    return {
        "entry": ENTRY,
        "mode": "run",
        "recipe": recipe.to_json(),
        "training_loaders": list(recipe.training_loaders),
        "folder": "",
        "status_folder": str(folder),
        "plan": plan.for_child() if plan else None,
        "prefix": sys.prefix,
        "seed": None,
        "descendants_end": False,
        "undo": None,
        "guard": None,
        "not_journaled": [],
    }


@contextlib.contextmanager
def _signals_passed_on() -> "Iterator[Callable[[subprocess.Popen[bytes]], None]]":
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


def _shells_code(code: int) -> int:
    """Return an exit code as a shell gives it, which names a signal by a number above 128."""
    return code if code >= 0 else 128 - code


def _is_told_alone() -> bool:
    """Tell whether an interrupt comes to this process and not to the script.

    A terminal tells all in its foreground, and `timeout` a whole group: a second interrupt would
    end a script that is saving. Only to the first process of a container nobody else is known.
    """
    if os.getpid() != 1:
        return False
    with contextlib.suppress(OSError), Path("/dev/tty").open("rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) != os.getpgrp()
    return True  # there is no terminal
