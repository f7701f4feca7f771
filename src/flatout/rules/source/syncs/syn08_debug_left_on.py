"""A debugging mode or a profiler runs through the whole training."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import remove, suggested
from flatout.analysis.source.script import Issue, Script, argument, constant
from flatout.analysis.source.training import backwards

MODES = ("torch.autograd.set_detect_anomaly", "torch.autograd.detect_anomaly")
PROFILERS = ("torch.autograd.profiler.profile", "torch.profiler.profile")
NVTX = "torch.autograd.profiler.emit_nvtx"


def check(script: Script) -> Iterator[Issue]:
    """Report anomaly detection that is switched on, and profilers around a training."""
    trained = backwards(script)
    for call in script.calls(*MODES):
        mode = argument(call, "mode", 0)
        if mode is not None and constant(mode) is not True:
            continue  # a flag of the script, or off
        statement = script.parents[call]
        yield Issue(
            node=call,
            because=(
                "anomaly detection keeps a stack of each operation and checks every gradient: the "
                "step takes a multiple of its time"
            ),
            instead="nothing; switch it on by a flag while looking for a NaN",
            fix=suggested(remove(script, statement)) if isinstance(statement, ast.Expr) else None,
        )
    for call in script.calls(*PROFILERS, NVTX):
        enabled = argument(call, "enabled", 0)
        has_end = argument(call, "schedule") is not None or (
            enabled is not None and not isinstance(enabled, ast.List)
        )
        block = script.inside(call, ast.With)
        around = block is not None and any(block in script.ancestors(each) for each in trained)
        if has_end or not around or (block is not None and script.loops(block)):
            continue
        yield Issue(
            node=call,
            because="the profiler records every operation of the whole training, in memory",
            instead="schedule=torch.profiler.schedule(wait=..., warmup=..., active=3, repeat=1)",
        )
