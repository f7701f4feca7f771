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
        outputs = {
            target.id
            for node in script.within(each.loop, ast.Assign)
            if isinstance(node.value, ast.Call) and script.source(node.value.func) == each.model
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        changed = {
            target.id
            for node in script.within(each.loop, ast.Assign)
            if not (
                isinstance(node.value, ast.Call) and script.source(node.value.func) == each.model
            )
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in script.within(each.loop, ast.Call):
            match call:
                case ast.Call(func=ast.Attribute(attr="append"), args=[kept]):
                    pass
                case _:
                    continue
            is_output = isinstance(kept, ast.Name) and kept.id in outputs - changed
            is_call = isinstance(kept, ast.Call) and script.source(kept.func) == each.model
            if is_output or is_call:
                yield Issue(
                    node=call,
                    because="all outputs of the evaluation stay in the device's memory at once",
                    instead=(
                        "what is needed of it, on the host: .argmax(-1).cpu(), a running sum, a "
                        "metric's update"
                    ),
                )
