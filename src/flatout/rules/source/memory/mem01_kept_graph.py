"""A running sum or a list of losses keeps the graph of every step."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import replaced, safe
from flatout.analysis.source.script import Issue, Script, names_in
from flatout.analysis.source.training import (
    StepPart,
    backward_loss,
    has_graph,
    loss_names,
    step_parts,
)


def check(script: Script) -> Iterator[Issue]:
    """Report `total += loss` and `losses.append(loss)` where nothing trains on the result."""
    for part in step_parts(script):
        trained = _trained_on(script, part)
        for kept, value in kept_values(script, part):
            if kept in trained or not has_graph(script, value, _losses(script, part)):
                continue
            detached = f"{_bracketed(script, value)}.detach()"
            yield Issue(
                node=value,
                because=(
                    f"`{kept}` keeps the graph of every step's loss: memory grows with each step"
                ),
                instead=f"{detached}, which has the same value and no graph",
                fix=safe(replaced(script, value, detached)),
            )


def kept_values(script: Script, part: StepPart) -> Iterator[tuple[str, ast.expr]]:
    """Yield what a step adds to a name from outside of it, with that name."""
    for node in script.within(part.node, ast.AugAssign, ast.Call):
        match node:
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                pass
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]):
                pass
            case _:
                continue
        if not _is_made_in(script, part, name):
            yield name, value


def _is_made_in(script: Script, part: StepPart, name: str) -> bool:
    """Return whether each step begins with a new value of that name."""
    return any(
        isinstance(target, ast.Name) and target.id == name
        for node in script.within(part.node, ast.Assign)
        for target in node.targets
    )


def _losses(script: Script, part: StepPart) -> frozenset[str]:
    losses = (backward_loss(script, call) for call in part.backwards)
    found = {name for loss in losses if loss is not None for name in loss_names(loss)}
    return frozenset(found & part.tensors)


def _trained_on(script: Script, part: StepPart) -> set[str]:
    """Return the names from which any backward of the function may start, however it gets there."""
    place = script.function(part.backwards[0]) or script.tree
    found: set[str] = set()
    for call in script.within(place, ast.Call):
        loss = backward_loss(script, call)
        if loss is not None:
            found |= names_in(loss)
    makes = [
        (names_in(target), names_in(node.value))
        for node in script.within(place, ast.Assign)
        for target in node.targets
    ]
    makes += [
        (names_in(node.target), names_in(node.value))
        for node in script.within(place, ast.AugAssign)
    ]
    for _ in makes:  # as many rounds as the longest way from one to the next
        found = found.union(*(given for made, given in makes if made & found))
    return found


def _bracketed(script: Script, value: ast.expr) -> str:
    text = script.source(value)
    return text if isinstance(value, ast.Name | ast.Attribute | ast.Call) else f"({text})"
