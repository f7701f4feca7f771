"""Weights that are missing in a checkpoint go unnoticed."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument, constant


def check(script: Script) -> Iterator[Issue]:
    """Report `load_state_dict(..., strict=False)` whose result is not looked at."""
    for call in script.methods("load_state_dict"):
        if constant(argument(call, "strict", 1)) is not False:
            continue
        if not isinstance(script.parents[call], ast.Expr):
            continue
        owner = call.func.value  # type: ignore[attr-defined]
        if isinstance(owner, ast.Call) and script.source(owner).startswith("super"):
            continue
        yield Issue(
            node=call,
            because=(
                "strict=False skips every name that does not match: with another prefix nothing is "
                "loaded, and the model starts from random weights"
            ),
            instead="missing, unexpected = ...load_state_dict(..., strict=False), and look at both",
        )
