"""Gradients add up over steps, or are cleared before the optimizer has used them."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import insert_after, insert_before, remove, suggested
from flatout.analysis.source.script import Issue, Script
from flatout.analysis.source.training import StepPart, backwards, optimizer_steps, step_parts

TRAINS_WRONG = True


def check(script: Script) -> Iterator[Issue]:
    """Report steps without any `zero_grad`, and `zero_grad` between `backward` and `step`."""
    parts = step_parts(script)
    if not script.methods("zero_grad", "zero_grads") and not _clears_by_hand(script):
        for part in parts:
            yield from _missing(script, part)
    for call in script.methods("zero_grad"):
        if _is_between(script, call):
            statement = script.statement(call)
            block = script.block(statement)
            after = block[block.index(statement) + 1 :]
            step = next(each for each in after if optimizer_steps(script, each))
            yield Issue(
                node=call,
                because="gradients are cleared after backward and before the step that needs them",
                instead="call zero_grad before backward or after step",
                fix=suggested(
                    remove(script, statement),
                    insert_after(script, step, script.source(statement)),
                ),
            )


def _missing(script: Script, part: StepPart) -> Iterator[Issue]:
    steps = [s for s in optimizer_steps(script, part.node) if "scaler" not in script.source(s)]
    if len(steps) != 1 or "accelerator" in script.source(part.backwards[0]):
        return
    made = script.origin(steps[0].func.value)  # type: ignore[attr-defined]
    if part.node in script.ancestors(made) and isinstance(made, ast.Call):
        return  # an optimizer for each round, as for each task: its gradients are new
    owner = script.source(steps[0].func.value)  # type: ignore[attr-defined]
    yield Issue(
        node=steps[0],
        because="no step clears the gradients: each one adds to those of all steps before",
        instead=f"{owner}.zero_grad() once a step",
        fix=suggested(
            insert_before(script, script.statement(part.backwards[0]), f"{owner}.zero_grad()")
        ),
    )


def _clears_by_hand(script: Script) -> bool:
    """Return whether something sets `.grad` or has a name such as `clear_gradients`."""
    if "zero_" in script.text or "accelerator" in script.text:
        return True
    attributes = script.nodes(ast.Attribute)
    return any(node.attr == "grad" and isinstance(node.ctx, ast.Store) for node in attributes)


def _is_between(script: Script, call: ast.Call) -> bool:
    """Return whether a call has a backward above and a step below in the very same block."""
    statement = script.statement(call)
    if script.parents[call] is not statement:
        return False
    block = script.block(statement)
    at = block.index(statement)
    trained = {script.statement(each) for each in backwards(script)}
    before = [i for i, each in enumerate(block[:at]) if each in trained]
    if not before or any(optimizer_steps(script, each) for each in block[before[-1] : at]):
        return False
    owner = script.source(call.func.value)  # type: ignore[attr-defined]
    for each in block[at + 1 :]:
        inner = script.within(each, ast.Call)
        if each in trained or any("backward" in script.source(call.func) for call in inner):
            return False
        if any(script.source(s.func.value) == owner for s in optimizer_steps(script, each)):  # type: ignore[attr-defined]
            return True
    return False
