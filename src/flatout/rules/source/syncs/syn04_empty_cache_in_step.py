"""The allocator's memory is given back, or garbage collected, in every step."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import remove, suggested
from flatout.analysis.source.script import Issue, Script
from flatout.analysis.source.training import runs_every_step, step_parts

WHY = {
    "torch.cuda.empty_cache": (
        "empty_cache waits for the device and gives its memory back, which the next step asks the "
        "driver for again"
    ),
    "gc.collect": "a full collection walks through every object of the process in every step",
}


def check(script: Script) -> Iterator[Issue]:
    """Report `empty_cache()` and `gc.collect()` in each step."""
    calls = script.calls(*WHY)
    for part in step_parts(script) if calls else ():
        for call in calls:
            if not runs_every_step(script, call, part):
                continue
            statement = script.parents[call]
            yield Issue(
                node=call,
                because=WHY[script.called(call)],
                instead="nothing: free memory is used again; find what keeps tensors if it grows",
                fix=suggested(remove(script, statement))
                if isinstance(statement, ast.Expr)
                else None,
            )
