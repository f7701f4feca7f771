"""A schedule steps before the optimizer, or at another rate than it was made for."""

import ast
import re
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument, last_name, names_in
from flatout.analysis.source.training import (
    StepPart,
    is_optimizer_step,
    runs_every_step,
    step_parts,
)

EPOCHS = re.compile(r"^(n_|num_|max_|total_)?epochs?$|^n_epoch$", re.IGNORECASE)
LENGTHS = {"CosineAnnealingLR": ("T_max", 1), "PolynomialLR": ("total_iters", 1)}
SCHEDULES = "torch.optim.lr_scheduler."


def check(script: Script) -> Iterator[Issue]:
    """Report schedules counted in epochs that step each batch, the reverse, and a wrong order."""
    parts = step_parts(script)
    for call in script.methods("step"):
        made = script.origin(call.func.value)  # type: ignore[attr-defined]
        name = script.called(made)
        if not name.startswith(SCHEDULES) or not isinstance(made, ast.Call):
            continue
        kind = name.removeprefix(SCHEDULES)
        part = next((p for p in parts if p.node in script.ancestors(call)), None)
        each_step = part is not None and runs_every_step(script, call, part)
        nested = part is not None and bool(script.loops(part.node))
        length = LENGTHS.get(kind)
        counted = length and argument(made, *length)
        # `for epoch in range(epochs)` within a loop over folds: an epoch is a step on all data.
        rounds = names_in(part.node.iter) if part and isinstance(part.node, ast.For) else set()
        by_epoch = last_name(counted) not in rounds and EPOCHS.match(last_name(counted))
        if each_step and nested and counted and by_epoch:
            yield Issue(
                node=call,
                because=(
                    f"{kind} was made for {script.source(counted)} epochs but steps on every "
                    "batch: it ends within the first epochs, then rises again"
                ),
                instead="step it once an epoch, or make it for epochs * len(loader)",
            )
        elif kind == "OneCycleLR" and part is None and _trains_below(script, call, parts):
            if argument(made, "steps_per_epoch") is not None:
                yield Issue(
                    node=call,
                    because=(
                        "OneCycleLR was made for every batch (steps_per_epoch) but steps once an "
                        "epoch: the rate hardly leaves its start"
                    ),
                    instead="step it after optimizer.step() in the loop of the batches",
                )
        elif each_step and _is_before_optimizer(script, call):
            yield Issue(
                node=call,
                because="the schedule steps before the optimizer: its first value is never used",
                instead="scheduler.step() after optimizer.step()",
            )


def _trains_below(script: Script, call: ast.Call, parts: list[StepPart]) -> bool:
    """Return whether the loop of a call has the loop of the batches within it."""
    return any(
        loop in script.ancestors(part.node) for loop in script.loops(call)[:1] for part in parts
    )


def _is_before_optimizer(script: Script, call: ast.Call) -> bool:
    statement = script.statement(call)
    block = script.block(statement)
    stepped = [
        i
        for i, each in enumerate(block)
        if isinstance(each, ast.Expr)
        and isinstance(each.value, ast.Call)
        and is_optimizer_step(script, each.value)
    ]
    return bool(stepped) and block.index(statement) < stepped[0]
