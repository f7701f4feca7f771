"""Gradients of several batches are added without dividing the loss."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import replaced, suggested
from flatout.analysis.source.script import Issue, Script, last_name
from flatout.analysis.source.training import (
    accumulation,
    backward_loss,
    divides_by,
    step_parts,
)

SCALES = ("accumulate", "accelerat", "deepspeed", "manual_backward", "normalize", "reduction")
"""Words of files in which something else divides, or sums are meant."""


def check(script: Script) -> Iterator[Issue]:
    """Report steps on every n-th batch whose loss is never divided by n."""
    if any(word in script.text for word in SCALES):
        return
    for part in step_parts(script):
        found = accumulation(script, part)
        if found is None or len(part.backwards) != 1:
            continue
        _test, counter, period = found
        call = part.backwards[0]
        place = script.function(call) or script.tree
        loss = backward_loss(script, call)
        if loss is None or divides_by(place, period) or isinstance(period, ast.Constant):
            continue
        if not any(word in last_name(period).lower() for word in ("accum", "grad", "micro", "n_")):
            continue
        number = script.source(period)
        yield Issue(
            node=call,
            because=(
                f"the optimizer steps on the sum over {number} batches: the gradient, and with it "
                f"the learning rate, is {number} times as large"
            ),
            instead=f"(loss / {number}).backward()",
            fix=suggested(replaced(script, loss, f"({script.source(loss)} / {number})"))
            if isinstance(loss, ast.Name) and counter is not None
            else None,
        )
