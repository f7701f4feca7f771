"""Evaluation keeps every output of the model on the device."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script
from flatout.analysis.source.training import evaluations, uses_device


def check(script: Script) -> Iterator[Issue]:
    """Report `outputs.append(model(x))` in evaluation loops, on the device as it is."""
    if not uses_device(script):
        return
    for each in evaluations(script):
        assigned = [
            (target.id, _calls(script, node.value, each.model))
            for node in script.within(each.loop, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        changed = {name for name, is_output in assigned if not is_output}
        outputs = {name for name, is_output in assigned if is_output} - changed
        for call in script.within(each.loop, ast.Call):
            match call:
                case ast.Call(func=ast.Attribute(attr="append"), args=[kept]):
                    pass
                case _:
                    continue
            is_output = isinstance(kept, ast.Name) and kept.id in outputs
            if is_output or _calls(script, kept, each.model):
                yield Issue(
                    node=call,
                    because="all outputs of the evaluation stay in the device's memory at once",
                    instead=(
                        "what is needed of it, on the host: .argmax(-1).cpu(), a running sum, a "
                        "metric's update"
                    ),
                )


def _calls(script: Script, value: ast.expr, model: str) -> bool:
    return isinstance(value, ast.Call) and script.source(value.func) == model
