"""Evaluation builds graphs that no one uses."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import suggested, wrap
from flatout.analysis.source.script import Issue, Script, constant, last_name
from flatout.analysis.source.training import Evaluation, evaluations, is_without_gradients


def check(script: Script) -> Iterator[Issue]:
    """Report loops that call a model in evaluation mode without `no_grad`."""
    for each in evaluations(script):
        calls = script.within(each.loop, ast.Call)
        called = [call for call in calls if script.source(call.func) == each.model]
        if all(is_without_gradients(script, call) for call in called):
            continue
        names = {last_name(call.func) for call in script.within(each.loop, ast.Call)}
        callees = [script.functions[name] for name in names & script.functions.keys()]
        function = script.function(each.loop)
        places = callees if function is None else [function, *callees]
        if any(_takes_gradients(script, place) for place in places) or _is_frozen(script, each):
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


def _is_frozen(script: Script, evaluation: Evaluation) -> bool:
    """Return whether no parameter of a model asks for a gradient: its calls build no graph."""
    for call in script.methods("parameters"):
        loop = script.parents[call]
        if script.source(call.func.value) != evaluation.model or not isinstance(loop, ast.For):  # type: ignore[attr-defined]
            continue
        for each in script.within(loop, ast.Assign):
            if last_name(each.targets[0]) == "requires_grad" and constant(each.value) is False:
                return True
    return any(
        script.source(call.func.value) == evaluation.model  # type: ignore[attr-defined]
        for call in script.methods("requires_grad_")
        if call.args and constant(call.args[0]) is False
    )
