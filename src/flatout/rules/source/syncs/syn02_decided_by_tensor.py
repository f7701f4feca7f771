"""Python decides by the value of a tensor in every step."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script
from flatout.analysis.source.training import (
    StepPart,
    is_periodic,
    is_tensor,
    runs_every_step,
    step_parts,
    uses_device,
)


def check(script: Script) -> Iterator[Issue]:
    """Report `if` and `while` on a tensor of the step, in every step."""
    if not uses_device(script):
        return
    for part in step_parts(script):
        for node in script.within(part.node, ast.If):
            if not _asks_every_time(script, node.test, part):
                continue
            if not runs_every_step(script, node, part):
                continue
            yield Issue(
                node=node,
                because=(
                    "the host waits in every step until the device has computed what decides here"
                ),
                instead=(
                    "decide on the device (torch.where, torch.nan_to_num), by the step before, or "
                    "every hundredth step"
                ),
            )


def _asks_every_time(script: Script, test: ast.expr, part: StepPart) -> bool:
    """Return whether a tensor decides, and nothing before it in an `and` that is rarely true."""
    tests = test.values if isinstance(test, ast.BoolOp) else [test]
    for each in tests:
        is_not = isinstance(each, ast.UnaryOp) and isinstance(each.op, ast.Not)
        asked = each.operand if is_not else each  # type: ignore[attr-defined]
        if is_tensor(script, asked, part.tensors):
            return True
        if is_periodic(script, each):
            return False
    return False
