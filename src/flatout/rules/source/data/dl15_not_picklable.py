"""A loader's function cannot be sent to a worker that does not fork."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument
from flatout.analysis.source.training import may_have_workers, train_loaders


def check(script: Script) -> Iterator[Issue]:
    """Report lambdas and nested functions that a loader with workers is given."""
    for call in train_loaders(script):
        if not may_have_workers(call):
            continue
        for name, position in (("collate_fn", 6), ("worker_init_fn", 10)):
            given = argument(call, name, position)
            what = given is not None and _local(script, given)
            if given is None or not what:
                continue
            yield Issue(
                node=given,
                because=(
                    f"{what} cannot be pickled: workers start only where they are forked, not on "
                    "Windows and macOS, nor by default from Python 3.14 on"
                ),
                instead=f"a function at the top of the file as {name}",
            )


def _local(script: Script, given: ast.expr) -> str:
    made = script.origin(given)
    if isinstance(made, ast.Lambda):
        return "a lambda"
    if isinstance(given, ast.Name):
        for value in script.values(given):
            is_function = isinstance(value, ast.FunctionDef)
            if is_function and not isinstance(script.parents[value], ast.Module | ast.If):
                return "a nested function"
    return ""
