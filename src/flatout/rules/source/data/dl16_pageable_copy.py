"""Batches are copied to the GPU from pageable memory."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import set_argument, suggested
from flatout.analysis.source.script import (
    Issue,
    Script,
    argument,
    constant,
    has_unpacked,
    root_name,
)
from flatout.analysis.source.training import is_device_move, loops_over, train_loaders


def check(script: Script) -> Iterator[Issue]:
    """Report loaders without pinned memory whose batches a loop copies to a GPU."""
    for call in train_loaders(script):
        pinned = argument(call, "pin_memory", 7)
        if has_unpacked(call) or (pinned is not None and constant(pinned) is not False):
            continue
        moves = [move for loop in loops_over(script, call) for move in copies(script, loop)]
        if not moves:
            continue
        edits = [set_argument(script, call, "pin_memory", "True")]
        edits += [
            set_argument(script, move, "non_blocking", "True")
            for move in moves
            if argument(move, "non_blocking", 1) is None and not has_unpacked(move)
        ]
        yield Issue(
            node=call,
            because=(
                f"line {moves[0].lineno} copies its batches to the GPU from pageable memory: the "
                "copy takes longer and the host waits for it"
            ),
            instead="pin_memory=True here, and non_blocking=True in the copy",
            fix=suggested(edits),
        )


def copies(script: Script, loop: ast.For) -> list[ast.Call]:
    """Return the copies to a device of what a loop draws."""
    drawn = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    # `for i, data in enumerate(loader): x, y = data`
    for each in script.within(loop, ast.Assign):
        if root_name(each.value) in drawn and isinstance(each.value, ast.Name | ast.Subscript):
            drawn |= {n.id for t in each.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    moved = [call for call in script.within(loop, ast.Call) if is_device_move(script, call)]
    return [call for call in moved if root_name(call.func) in drawn]
