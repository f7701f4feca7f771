"""The graph is kept after the only backward that uses it."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import remove_argument, suggested
from flatout.analysis.source.script import Issue, Script, argument, constant, names_in
from flatout.analysis.source.training import step_parts

COUNTS = frozenset({"range", "trange"})


def check(script: Script) -> Iterator[Issue]:
    """Report `backward(retain_graph=True)` where a step has no other backward."""
    for part in step_parts(script):
        others = script.calls("torch.autograd.grad")
        if len(part.backwards) != 1 or others or len(script.methods("backward")) > 1:
            continue
        call = part.backwards[0]
        if constant(argument(call, "retain_graph", 1)) is not True:
            continue
        if argument(call, "create_graph", 2) is not None:
            continue  # gradients that are trained on, or penalised
        inner = script.loops(call)
        if inner and inner[0] is not part.node:
            continue  # a loop over outputs of one graph
        if isinstance(part.node, ast.For) and names_in(part.node.iter) & COUNTS:
            continue  # passes over the same data: policies of before may hold a graph
        if _is_carried(script, part.node):
            continue
        yield Issue(
            node=call,
            because="the graph of the step stays in memory although nothing goes through it again",
            instead="backward() without retain_graph; .detach() what the next step takes over",
            fix=suggested(remove_argument(script, call, "retain_graph")),
        )


def _is_carried(script: Script, step: ast.AST) -> bool:
    """Return whether a step may use tensors of the one before, as recurrent states do."""
    names = {name for name in script.words if name in {"hidden", "state", "hx", "h0", "memory"}}
    if any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(step)):
        return True
    # `output, h = cell(x, h)`, whatever the name.
    return any(
        names_in(target) & names_in(given)
        for each in script.within(step, ast.Assign)
        if isinstance(each.value, ast.Call)
        for given in each.value.args
        for target in each.targets
    )
