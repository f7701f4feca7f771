"""Write into a script what a technique does at a hook point: arguments, lines, a block."""

import ast
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any

from flatout.analysis.source.edits import (
    add_argument,
    insert_after,
    insert_before,
    set_argument,
    wrap,
)
from flatout.analysis.source.script import (
    Script,
    argument,
    has_unpacked,
    is_self_attribute,
    names_in,
)
from flatout.analysis.source.training import (
    StepPart,
    copies,
    is_optimizer_step,
    loops_over,
    models,
    step_parts,
    train_loaders,
    uses_device,
)
from flatout.records.finding import Edit, Fix
from flatout.records.technique import SourceForm


def source_fix(script: Script, form: SourceForm, settings: Mapping[str, Any]) -> Fix | None:
    """Return the edits that do permanently what a technique does, None where no place is clear.

    The settings are put in for `$name`.
    """
    values = {name: str(value) for name, value in settings.items()}
    parts = step_parts(script)
    if not parts or any(settings.get(name) != value for name, value in form.only_with.items()):
        return None
    edits: list[Edit | None] = []
    if form.loader:
        filled = {name: Template(text).substitute(values) for name, text in form.loader.items()}
        edits += _loader_edits(script, parts, filled)
    if form.copy:
        edits += _copy_edits(script, parts, form.copy)
    if form.optimizer:
        edits += _optimizer_edits(script, form)
    if form.start:
        edits.append(_after_imports(script, Template(form.start).substitute(values)))
    if form.model:
        edits.append(_model_edit(script, parts[0], form.model, values))
    if form.around_block:
        edits += _block_edits(script, form.around_block)
    if form.around_forward:
        for part in parts:
            edits += _forward_edits(script, part, form.around_forward)
    found = [edit for edit in edits if edit is not None]
    return Fix(edits=tuple(found)) if found and len(found) == len(edits) else None


def _loaders(script: Script, parts: Sequence[StepPart]) -> list[tuple[ast.Call, list[ast.For]]]:
    """Return the loaders that a training draws from, with the loops; a lone one in any case."""
    made = list(train_loaders(script))
    nodes = {id(part.node) for part in parts}
    found = []
    for call in made:
        loops = [loop for loop in loops_over(script, call) if id(loop) in nodes]
        if loops or len(made) == 1:
            found.append((call, loops))
    return found


MOST_BY_PLACE = 5
"""Arguments of a `DataLoader` before its number of workers."""


def _loader_edits(
    script: Script, parts: Sequence[StepPart], arguments: Mapping[str, str]
) -> list[Edit | None]:
    edits: list[Edit | None] = []
    for call, _loops in _loaders(script, parts):
        if has_unpacked(call) or len(call.args) > MOST_BY_PLACE:
            return [None]  # it may be given what is to be added
        written = {keyword.arg for keyword in call.keywords}
        for name, value in arguments.items():
            if name in written:
                edits.append(set_argument(script, call, name, value))
        new = [f"{name}={value}" for name, value in arguments.items() if name not in written]
        if new:
            # One edit: two at the same place would have no order.
            edits.append(add_argument(script, call, ", ".join(new)))
    return edits or [None]


def _copy_edits(script: Script, parts: Sequence[StepPart], argument: str) -> list[Edit | None]:
    name, _equals, value = argument.partition("=")
    loops = [part.node for part in parts if isinstance(part.node, ast.For)]
    moves = [move for loop in loops for move in copies(script, loop)]
    return [set_argument(script, move, name, value) for move in moves]


def _optimizer_edits(script: Script, form: SourceForm) -> list[Edit | None]:
    stepped = {
        id(script.origin(call.func.value))  # type: ignore[attr-defined]
        for call in script.methods("step")
        if is_optimizer_step(script, call)
    }
    made = [
        call
        for call in script.calls("torch.optim.")
        if script.called(call).rpartition(".")[2] in form.optimizers
    ]
    used = [call for call in made if id(call) in stepped] or (made if len(made) == 1 else [])
    if any(map(has_unpacked, used)):
        return [None]
    return [
        set_argument(script, call, name, value)
        for call in used
        for name, value in form.optimizer.items()
    ] or [None]


def _after_imports(script: Script, line: str) -> Edit | None:
    last: ast.stmt | None = None
    for statement in script.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            last = statement
    if last is None or script.imports.get("torch") != "torch":
        return None
    return insert_after(script, last, line)


def _model_edit(
    script: Script, part: StepPart, line: str, values: Mapping[str, str]
) -> Edit | None:
    """Return the line above the outermost loop around the steps, in the model's own function."""
    found = _model(script, part)
    if found is None:
        return None
    loops = [part.node, *script.loops(part.node)]
    outermost = loops[-1]
    if not isinstance(outermost, ast.For | ast.While) or not isinstance(found.func, ast.Name):
        return None
    made = script.values(found.func)
    if not made or any(isinstance(value, ast.arg) for value in made):
        return None  # handed in: the line belongs where it was made
    text = Template(line).substitute(values, model=found.func.id)
    return insert_before(script, outermost, text)


def _model(script: Script, part: StepPart) -> ast.Call | None:
    """Return the one call of a model in a step, None where there are none or several."""
    names = models(script)
    calls = [
        call for call in script.within(part.node, ast.Call) if script.source(call.func) in names
    ]
    return calls[0] if len({script.source(call.func) for call in calls}) == 1 else None


def _forward_edits(script: Script, part: StepPart, header: str) -> list[Edit | None]:
    """Return the block from the model's call to the loss, all before `backward`."""
    call = _model(script, part)
    if call is None or len(part.backwards) != 1 or script.imports.get("torch") != "torch":
        return [None]
    first = script.statement(call)
    last = script.statement(part.backwards[0])
    block = script.block(first)
    places = {id(each): i for i, each in enumerate(block)}
    if id(last) not in places or places[id(first)] >= places[id(last)]:
        return [None]
    body = block[places[id(first)] : places[id(last)]]
    # What has nothing to do with the loss, as zero_grad has, stays outside at the end.
    while len(body) > 1 and not isinstance(body[-1], ast.Assign | ast.AugAssign):
        body.pop()
    return wrap(script, body, Template(header).substitute(device=_device_type(script, part)))


def _device_type(script: Script, part: StepPart) -> str:
    """Return an expression for the kind of device that a step runs on."""
    for node in script.nodes(ast.Assign):
        if script.called(node.value) == "torch.device" and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in names_in(part.node):
                return f"{name}.type"
    for move in copies(script, part.node) if isinstance(part.node, ast.For) else ():
        device = argument(move, "device", 0)
        if device is not None and not isinstance(device, ast.Constant):
            return f"torch.device({script.source(device)}).type"
    return '"cuda"' if uses_device(script) else '"cpu"'


def _block_edits(script: Script, function: str) -> list[Edit | None]:
    """Return the calls of blocks in `for block in self.blocks: x = block(x)`, each in another call.

    Batch norm would count each batch twice, so that a file with one has no clear place.
    """
    if script.imports.get("torch") != "torch" or any("BatchNorm" in w for w in script.words):
        return [None]
    edits: list[Edit | None] = []
    for loop in script.nodes(ast.For):
        owner = script.function(loop)
        is_forward = owner is not None and owner.name == "forward"
        if not is_forward or not is_self_attribute(loop.iter):
            continue
        if not isinstance(loop.target, ast.Name):
            continue
        for call in script.within(loop, ast.Call):
            if isinstance(call.func, ast.Name) and call.func.id == loop.target.id and call.args:
                edits += _checkpointed(script, call, function)
    module = function.rpartition(".")[0]
    return [_after_imports(script, f"import {module}"), *edits] if edits else [None]


def _checkpointed(script: Script, call: ast.Call, function: str) -> list[Edit | None]:
    start, _end = script.span(call)
    name_end = script.span(call.func)[1]
    opening = script.text.index("(", name_end) + 1
    first = Edit(start=start, end=opening, text=f"{function}({script.source(call.func)}, ")
    return [first, add_argument(script, call, "use_reentrant=False")]
