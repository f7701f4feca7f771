"""A collective is called on one rank only: the training hangs."""

import ast
import re
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument, last_name

COLLECTIVES = tuple(
    f"torch.distributed.{name}"
    for name in (
        "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "barrier",
        "broadcast", "broadcast_object_list", "reduce", "reduce_scatter", "gather", "scatter",
        "all_to_all", "monitored_barrier",
    )
)  # fmt: skip
ONE_RANK = re.compile(r"(?<![a-z])(global_)?rank$|^is_(main|master)(_process)?$", re.IGNORECASE)


def check(script: Script) -> Iterator[Issue]:
    """Report collectives below `if rank == 0:` that other ranks of the function never reach."""
    for call in script.calls(*COLLECTIVES):
        if argument(call, "group") is not None:
            continue
        test = _rank_test(script, call)
        if test is None:
            continue
        place = script.function(call) or script.tree
        name = script.called(call)
        partners = [
            each
            for each in script.within(place, ast.Call)
            if each is not call
            and script.called(each) == name
            and not _shares(script, each, test)
            and _is_for_others(script, each, test)
        ]
        if partners:
            continue  # the others wait elsewhere: `if rank != 0: barrier()`
        yield Issue(
            node=call,
            because=(
                f"only one rank gets to this {name.rpartition('.')[2]}; it waits for the others "
                "until the time-out"
            ),
            instead="call it on every rank, and let one rank use the result",
        )


def _rank_test(script: Script, call: ast.Call) -> ast.If | None:
    child: ast.AST = call
    for ancestor in script.ancestors(call):
        if isinstance(ancestor, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return None
        is_body = isinstance(ancestor, ast.If) and any(child is each for each in ancestor.body)
        if is_body and _asks_one_rank(ancestor.test):  # type: ignore[attr-defined]
            return ancestor  # type: ignore[return-value]
        child = ancestor
    return None


def _asks_one_rank(test: ast.expr) -> bool:
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=int())]):
            name = last_name(left.func) if isinstance(left, ast.Call) else last_name(left)
            return bool(ONE_RANK.search(name)) and "local" not in name
        case ast.Name() | ast.Attribute() | ast.Call():
            name = last_name(test.func) if isinstance(test, ast.Call) else last_name(test)
            return bool(re.match(r"^is_(main|master)(_process)?$", name))
    return False


def _is_for_others(script: Script, call: ast.Call, test: ast.If) -> bool:
    """Return whether the rank of a branch may pass a call by: one that all make is no partner."""
    around = set(script.ancestors(test))
    return isinstance(test.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break) or any(
        isinstance(each, ast.If) and each not in around for each in script.ancestors(call)
    )


def _shares(script: Script, call: ast.Call, test: ast.If) -> bool:
    """Return whether a call is below the same branch."""
    return any(each is test for each in script.ancestors(call)) and not any(
        each in script.ancestors(call) or each is script.statement(call) for each in test.orelse
    )
