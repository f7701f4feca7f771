"""Gradients are exchanged at another batch than the one after which the optimizer steps."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, last_name, same
from flatout.analysis.source.training import accumulation, modulo, step_parts

TRAINS_WRONG = True


def check(script: Script) -> Iterator[Issue]:
    """Report `no_sync` and `step` that ask for different remainders of the same number."""
    for part in step_parts(script):
        found = accumulation(script, part)
        if found is None:
            continue
        test, counter, period = found
        for call in script.within(part.node, ast.Call):
            if last_name(call.func) != "no_sync":
                continue
            guard = _guard(script, call)
            parts = guard and modulo(guard)
            if not parts or not same(parts[1], period) or same(parts[0], counter):
                continue
            yield Issue(
                node=call,
                because=(
                    f"gradients are exchanged by `{script.source(guard)}` and the optimizer steps "  # type: ignore[arg-type]
                    f"by `{script.source(test.test)}`: the ranks step on their own gradients and "
                    "drift apart"
                ),
                instead="one variable for both: steps = (i + 1) % n == 0",
            )


def _guard(script: Script, call: ast.Call) -> ast.expr | None:
    """Return the condition that decides whether `no_sync` is used."""
    for ancestor in script.ancestors(call):
        if isinstance(ancestor, ast.If | ast.IfExp):
            return ancestor.test
        if isinstance(ancestor, ast.For | ast.While | ast.FunctionDef):
            break
    return None
