"""Rows of a tensor are picked one by one and stacked again."""

import ast
import re
from collections.abc import Iterator

from flatout.analysis.source.edits import replaced, suggested
from flatout.analysis.source.script import Issue, Script, argument
from flatout.records.finding import Fix

STACKS = ("torch.stack", "numpy.stack", "numpy.array", "numpy.asarray", "torch.tensor")
MAKES_ARRAY = ("torch.", "numpy.")
MAKES_OTHERS = re.compile(r"^torch\.(utils|nn)\.|(split|chunk|unbind|meshgrid)$")
"""Data sets, modules and tuples: a list of numbers picks nothing of them at once."""


def check(script: Script) -> Iterator[Issue]:
    """Report `torch.stack([data[i] for i in picked])` where `data` is a tensor or an array."""
    for call in script.calls(*STACKS):
        if len(call.args) != 1 or argument(call, "dim") is not None or call.keywords:
            continue
        match call.args[0]:
            case ast.ListComp(
                elt=ast.Subscript(value=data, slice=ast.Name(id=one)),
                generators=[ast.comprehension(target=ast.Name(id=each), iter=picked, ifs=[])],
            ) if one == each and _is_array(script, data):
                yield Issue(
                    node=call,
                    because="a Python loop picks rows one by one and copies them twice",
                    instead=f"{script.source(data)}[{script.source(picked)}]: one read of all rows",
                    fix=_fix(script, call, data, picked),
                )


def _is_array(script: Script, data: ast.expr) -> bool:
    made = script.origin(data)
    name = script.called(made)
    return made is not data and name.startswith(MAKES_ARRAY) and not MAKES_OTHERS.search(name)


def _fix(script: Script, call: ast.Call, data: ast.expr, picked: ast.expr) -> Fix | None:
    is_tensor = script.called(script.origin(data)).startswith("torch.")
    is_stack = script.called(call) in {"torch.stack", "numpy.stack"}
    is_list = isinstance(picked, ast.Name | ast.Attribute)
    if not is_stack or not is_list or is_tensor != script.called(call).startswith("torch."):
        return None
    rows = script.source(picked)
    made = script.origin(picked)
    if isinstance(made, ast.Tuple) or script.called(made) in {"tuple", "zip"}:
        rows = f"list({rows})"  # a tuple picks one value, by dimensions
    return suggested(replaced(script, call, f"{script.source(data)}[{rows}]"))
