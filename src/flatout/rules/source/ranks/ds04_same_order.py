"""The samples have the same order in every epoch."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import insert_before, suggested
from flatout.analysis.source.script import Issue, Loop, Script, argument, constant
from flatout.analysis.source.training import step_parts
from flatout.records.finding import Fix

SAMPLER = "torch.utils.data.DistributedSampler"
TRAINS_WRONG = True


def check(script: Script) -> Iterator[Issue]:
    """Report shuffling `DistributedSampler`s of training loops that never call `set_epoch`."""
    if "set_epoch" in script.words or "accelerat" in script.text:
        return
    epochs = [loops[0] for part in step_parts(script) if (loops := script.loops(part.node))]
    for call in script.calls(SAMPLER):
        shuffle = argument(call, "shuffle", 3)
        if not epochs or (shuffle is not None and constant(shuffle) is not True):
            continue
        target = getattr(script.parents[call], "targets", [None])[0]
        name = script.source(target) if target is not None else ""
        if any(word in (name + script.source(call)).lower() for word in ("val", "test", "eval")):
            continue
        yield Issue(
            node=call,
            because="without set_epoch the sampler shuffles by the same seed in each epoch",
            instead="sampler.set_epoch(epoch) at the start of each epoch",
            fix=_fix(script, target, epochs[0]),
        )


def _fix(script: Script, target: ast.AST | None, epochs: Loop) -> Fix | None:
    if not isinstance(epochs, ast.For) or not isinstance(epochs.target, ast.Name):
        return None
    if not isinstance(target, ast.Name):
        return None
    if script.scope(target) is not script.scope(epochs) or epochs in script.ancestors(target):
        return None
    line = f"{target.id}.set_epoch({epochs.target.id})"
    return suggested(insert_before(script, epochs.body[0], line))
