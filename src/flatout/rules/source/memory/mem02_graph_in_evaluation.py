"""Evaluation builds graphs that no one uses."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import suggested, wrap
from flatout.analysis.source.script import Issue, Script
from flatout.analysis.source.training import evaluations, is_without_gradients


def check(script: Script) -> Iterator[Issue]:
    """Report loops that call a model in evaluation mode without `no_grad`."""
    for each in evaluations(script):
        calls = script.within(each.loop, ast.Call)
        called = [call for call in calls if script.source(call.func) == each.model]
        if all(is_without_gradients(script, call) for call in called):
            continue
        function = script.function(each.loop)
        if function is not None and _takes_gradients(script, function):
            continue
        has_torch = script.knows("torch", each.loop)
        header = "with torch.no_grad():"
        yield Issue(
            node=each.loop,
            because=(
                f"{each.model} is in evaluation mode, but every call builds a graph: more memory "
                "and time for gradients that no one asks for"
            ),
            instead="put the loop under `with torch.no_grad():` (or torch.inference_mode)",
            fix=suggested(wrap(script, [each.loop], header)) if has_torch else None,
        )


def _takes_gradients(script: Script, function: ast.AST) -> bool:
    names = {"backward", "grad", "requires_grad_", "enable_grad", "jacobian", "hessian", "vjp"}
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr in names
        for call in script.within(function, ast.Call)
    )
