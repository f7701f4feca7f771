"""A loader is made, or started, again for every batch."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script
from flatout.analysis.source.training import (
    may_have_workers,
    runs_every_step,
    step_parts,
    train_loaders,
)


def check(script: Script) -> Iterator[Issue]:
    """Report `next(iter(loader))` in a loop, and loaders that a step or every epoch makes."""
    for call in script.nodes(ast.Call):
        match call:
            case ast.Call(
                func=ast.Name(id="next"),
                args=[ast.Call(func=ast.Name(id="iter"), args=[drawn]), *_],
            ) if script.called(script.origin(drawn)) == "torch.utils.data.DataLoader":
                inside = script.loops(call)
                # A loader that is made in the same loop gives its only batch here.
                if inside and inside[0] not in script.ancestors(script.origin(drawn)):
                    yield Issue(
                        node=call,
                        because=(
                            "each call starts the loader from the beginning, workers and all, for "
                            "one batch"
                        ),
                        instead="one iterator before the loop, and a new one when it is used up",
                    )
    parts = {part.node: part for part in step_parts(script)}
    # In a loop over folds, with one over epochs below, a loader has samples of its own.
    epochs = {loops[0] for part in parts if (loops := script.loops(part))}
    for call in train_loaders(script):
        inside = script.loops(call)
        step = next((parts[loop] for loop in inside if loop in parts), None)
        if step is not None:
            if not runs_every_step(script, call, step):
                continue  # an evaluation now and then
            because = "every step makes a loader of its own"
        elif inside and may_have_workers(call) and inside[0] in epochs:
            because = "every epoch makes a loader of its own: its workers start again each time"
        else:
            continue
        yield Issue(node=call, because=because, instead="make the loader once, before the loop")
