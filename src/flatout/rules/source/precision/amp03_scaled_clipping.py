"""Gradients are clipped while they are scaled."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import insert_before, suggested
from flatout.analysis.source.script import Issue, Script, last_name
from flatout.analysis.source.training import backwards

CLIPS = (
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_",
    "torch.nn.utils.clip_grad_norm",
)
TRAINS_WRONG = True


def check(script: Script) -> Iterator[Issue]:
    """Report clipping in a function that scales its loss and never unscales."""
    for call in script.calls(*CLIPS):
        place = script.function(call) or script.tree
        scaled = [
            each
            for each in backwards(script)
            if _is_scaled(each)
            and (script.function(each) or script.tree) is place
            and not script.are_alternatives(each, call)
        ]
        inner = list(script.within(place, ast.Call))
        if not scaled or any(last_name(each.func) == "unscale_" for each in inner):
            continue
        if scaled[0].lineno > call.lineno:
            continue
        steps = [
            each
            for each in inner
            if last_name(each.func) == "step"
            and each.lineno > call.lineno  # of several optimizers the one that steps next
            and "scaler" in script.source(each.func)
            and each.args
        ]
        fix = None
        if steps:
            scaler = script.source(steps[0].func.value)  # type: ignore[attr-defined]
            line = f"{scaler}.unscale_({script.source(steps[0].args[0])})"
            fix = suggested(insert_before(script, script.statement(call), line))
        yield Issue(
            node=call,
            because=(
                "the gradients are still multiplied by the scaler's factor, 65,536 at first: the "
                "limit clips them to almost nothing"
            ),
            instead="scaler.unscale_(optimizer) before clipping",
            fix=fix,
        )


def _is_scaled(call: ast.Call) -> bool:
    owner = call.func.value  # type: ignore[attr-defined]
    return isinstance(owner, ast.Call) and last_name(owner.func) == "scale"
