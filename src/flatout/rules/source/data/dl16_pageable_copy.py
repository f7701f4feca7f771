"""Batches are copied to the GPU from pageable memory."""

from collections.abc import Iterator

from flatout.analysis.source.edits import set_argument, suggested
from flatout.analysis.source.script import (
    Issue,
    Script,
    argument,
    constant,
    has_unpacked,
)
from flatout.analysis.source.training import DEVICE, copies, loops_over, train_loaders


def check(script: Script) -> Iterator[Issue]:
    """Report loaders without pinned memory whose batches a loop copies to a GPU."""
    for call in train_loaders(script):
        pinned = argument(call, "pin_memory", 7)
        collate = argument(call, "collate_fn", 6)
        if collate is not None and DEVICE.search(script.source(collate)):
            continue  # its batches are on the device already, and cannot be pinned
        if has_unpacked(call) or (pinned is not None and constant(pinned) is not False):
            continue
        moves = [move for loop in loops_over(script, call) for move in copies(script, loop)]
        if not moves:
            continue
        edits = [set_argument(script, call, "pin_memory", "True", 7)]
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
