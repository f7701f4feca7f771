"""The host waits for the device on purpose in every step."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import remove, suggested
from flatout.analysis.source.script import Issue, Script
from flatout.analysis.source.training import runs_every_step, step_parts, trains

WAITS = ("torch.cuda.synchronize", "torch.accelerator.synchronize", "torch.mps.synchronize")


def check(script: Script) -> Iterator[Issue]:
    """Report `torch.cuda.synchronize()` in each step."""
    calls = script.calls(*WAITS)
    for part in step_parts(script) if calls and trains(script) else ():
        for call in calls:
            if not runs_every_step(script, call, part):
                continue
            statement = script.parents[call]
            is_timed = bool(script.calls("time.time", "time.perf_counter", "time.monotonic"))
            yield Issue(
                node=call,
                because="synchronize stops the host in every step until the device is idle",
                instead=(
                    "torch.cuda.Event(enable_timing=True) around what is timed, read at the end"
                    if is_timed
                    else "nothing: reading a value waits on its own"
                ),
                fix=suggested(remove(script, statement))
                if isinstance(statement, ast.Expr) and not is_timed
                else None,
            )
