"""Each sample opens a file that no one closes."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script
from flatout.analysis.source.training import worker_functions


def check(script: Script) -> Iterator[Issue]:
    """Report `open(...)` outside of `with` where samples are read, without any `close`."""
    for function, name in worker_functions(script):
        closes = any(
            isinstance(call.func, ast.Attribute) and call.func.attr in {"close", "enter_context"}
            for call in script.within(function, ast.Call)
        )
        for call in script.within(function, ast.Call):
            is_open = isinstance(call.func, ast.Name) and call.func.id == "open"
            if not is_open or closes or "open" in script.imports or _is_managed(script, call):
                continue
            yield Issue(
                node=call,
                because=f"{name} opens a file for each sample and closes none: descriptors run out",
                instead="with open(...) as file:",
            )


def _is_managed(script: Script, call: ast.Call) -> bool:
    """Return whether a `with` closes the file, or it is handed out."""
    parent = script.parents[call]
    return isinstance(parent, ast.withitem | ast.Return | ast.Yield) or (
        isinstance(parent, ast.Call) and isinstance(script.parents[parent], ast.withitem)
    )
