"""A value is read from the device in every step."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import replaced, suggested
from flatout.analysis.source.script import Issue, Script, constant, names_in
from flatout.analysis.source.training import (
    StepPart,
    is_tensor,
    runs_every_step,
    step_parts,
    uses_device,
)
from flatout.records.finding import Fix

METHODS = frozenset({"item", "cpu", "numpy", "tolist"})


def check(script: Script) -> Iterator[Issue]:
    """Report calls in each step that wait for the device to have computed a tensor."""
    if not uses_device(script):
        return
    for part in step_parts(script):
        for call in script.within(part.node, ast.Call):
            what = reads(script, call, part)
            if not what or not runs_every_step(script, call, part):
                continue
            if _is_acted_on(script, call, part):
                continue
            yield Issue(
                node=call,
                because=f"{what} in every step makes the host wait until the device has caught up",
                instead=(
                    "keep the value on the device (.detach()) and read it every hundredth step or "
                    "at the end of the epoch"
                ),
                fix=_fix(script, call),
            )


def reads(script: Script, call: ast.Call, part: StepPart) -> str:
    """Return what a call does that needs a tensor's value on the host, "" if nothing."""
    first = call.args[0] if call.args else None
    match call.func:
        case ast.Attribute(value=owner, attr=name) if is_tensor(script, owner, part.tensors):
            if name in METHODS and first is None and not call.keywords:
                return f".{name}()"
            return '.to("cpu")' if name == "to" and constant(first) == "cpu" else ""
        case ast.Name(id="float" | "int" as name) if first is not None:
            return f"{name}(tensor)" if is_tensor(script, first, part.tensors) else ""
        case ast.Name(id="print"):
            return "printing a tensor" if _prints(script, call, part) else ""
    return ""


def _is_acted_on(script: Script, call: ast.Call, part: StepPart) -> bool:
    """Return whether an environment steps with the value: the host has to have it."""
    statement = script.statement(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {node.id for t in targets for node in ast.walk(t) if isinstance(node, ast.Name)}
    for step in script.methods("step"):
        given = [*step.args, *(keyword.value for keyword in step.keywords)]
        if part.node in script.ancestors(step) and any(
            call is each or (isinstance(each, ast.Name) and each.id in names)
            for value in given
            for each in ast.walk(value)
        ):
            return "env" in script.source(step.func).lower()
    return False


def _prints(script: Script, call: ast.Call, part: StepPart) -> bool:
    shown = list(call.args)
    for each in call.args:
        if isinstance(each, ast.JoinedStr):
            shown += [v.value for v in each.values if isinstance(v, ast.FormattedValue)]
    return any(is_tensor(script, each, part.tensors) for each in shown)


def _fix(script: Script, call: ast.Call) -> Fix | None:
    """Return `total += loss.detach()` for `total += loss.item()`: the sum stays on the device."""
    parent = script.parents[call]
    is_sum = isinstance(parent, ast.AugAssign) and isinstance(parent.target, ast.Name)
    if not is_sum or not isinstance(call.func, ast.Attribute) or call.func.attr != "item":
        return None
    total = parent.target.id  # type: ignore[attr-defined]
    place = script.function(call) or script.tree
    sums = {total}
    for made in script.within(place, ast.Assign):
        if names_in(made.value) & sums and not isinstance(made.value, ast.Call):  # the mean of it
            sums |= {each.id for each in made.targets if isinstance(each, ast.Name)}
    # A number is asked for where the sum is rounded, compared, returned or put into a record.
    asking: tuple[type[ast.AST], ...] = (ast.Call, ast.Compare, ast.Dict, ast.Return, ast.Assign)
    for node in script.within(place, *asking):
        given = node
        if isinstance(node, ast.Assign):
            if isinstance(node.targets[0], ast.Name):
                continue
            given = node.value
        if node is not call and sums & names_in(given) and not _is_shown(node):
            return None
    return suggested(replaced(script, call, f"{script.source(call.func.value)}.detach()"))


def _is_shown(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and names_in(node.func) & {"print", "info", "len"} != set()
