"""A tensor is made on the host and then copied to the device."""

import ast
import math
from collections.abc import Iterator

from flatout.analysis.source.edits import add_argument, replaced, safe, suggested
from flatout.analysis.source.script import Issue, Script, argument, constant, has_unpacked
from flatout.analysis.source.training import is_device_move
from flatout.records.finding import Fix

EXACT = frozenset({"zeros", "ones", "full", "eye"})
"""The same numbers on every device."""
OTHERS = frozenset(["rand", "randn", "randint", "randperm", "empty", "arange", "linspace"])
"""Other random numbers, or another rounding."""
SMALL = 1024
"""Elements, as numbers in the source: a counter, a scalar."""


def check(script: Script) -> Iterator[Issue]:
    """Report `torch.zeros(...).cuda()` and its like."""
    for move in script.methods("cuda", "to"):
        made = move.func.value  # type: ignore[attr-defined]
        name = script.called(made).removeprefix("torch.")
        if name not in EXACT | OTHERS or not is_device_move(script, move):
            continue
        others = len(move.args) > 1 or any(
            keyword.arg not in {"device", "non_blocking"} for keyword in move.keywords
        )
        if others or has_unpacked(made) or argument(made, "device") is not None:
            continue
        if _is_small(made):
            continue
        yield Issue(
            node=move,
            because=f"torch.{name} fills memory of the host, which is then copied to the device",
            instead="make it there: device=... in the call",
            fix=_fix(script, move, made, name),
        )


def _is_small(made: ast.Call) -> bool:
    """Return whether a tensor is known to have few elements: its copy costs as much as a launch."""
    sizes = [each for arg in made.args for each in getattr(arg, "elts", [arg])]
    numbers = [constant(each) for each in sizes]
    known = [number for number in numbers if isinstance(number, int)]
    # `arange(0, n)`, `randint(0, 9, ...)` and `full(..., 0)` begin, draw and are filled with 0.
    return len(known) == len(sizes) > 0 and math.prod(max(1, each) for each in known) <= SMALL


def _fix(script: Script, move: ast.Call, made: ast.Call, name: str) -> Fix | None:
    if argument(made, "requires_grad") is not None or argument(made, "pin_memory") is not None:
        return None
    target = argument(move, "device", 0)
    device = script.source(target) if target is not None else '"cuda"'
    # `.cuda(1)` takes a number; the keyword does as well.
    added = add_argument(script, made, f"device={device}")
    if added is None:
        return None
    start, end = script.span(made)
    text = script.text[start : added.start] + added.text + script.text[added.start : end]
    edit = replaced(script, move, text)
    return safe(edit) if name in EXACT else suggested(edit)
