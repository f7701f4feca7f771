"""Write into a script what a technique does at a hook point: arguments, lines, a block."""

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from string import Template
from typing import Any

from flatout.analysis.source.edits import (
    add_argument,
    insert_after_import,
    insert_before,
    replaced,
    set_argument,
    wrap,
)
from flatout.analysis.source.script import (
    Script,
    argument,
    has_unpacked,
    is_self_attribute,
    last_name,
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
    worker_count,
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
        edits.append(_start_edit(script, Template(form.start).substitute(values)))
    if form.model:
        edits.append(_model_edit(script, parts[0], form, values))
    if form.around_block:
        edits += _block_edits(script, form.around_block)
    if form.around_forward:
        for part in parts:
            edits += _forward_edits(script, part, form.around_forward)
    found = [edit for edit in edits if edit is not None]
    return Fix(edits=tuple(found)) if found and len(found) == len(edits) else None


def _loaders(script: Script, parts: Sequence[StepPart]) -> list[ast.Call]:
    """Return the loaders that a training draws from; a lone one that no loop of the file does."""
    made = list(train_loaders(script))
    found = []
    for call in made:
        loops = loops_over(script, call)
        if any(_trains(script, loop, parts) for loop in loops) or (len(made) == 1 and not loops):
            found.append(call)
    return found


def _trains(script: Script, loop: ast.For, parts: Sequence[StepPart]) -> bool:
    """Return whether a loop makes steps, or calls what makes one."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [part.node for part in parts if isinstance(part.node, kinds)]
    calls = [call for function in functions for call in script.calls_of(function)]
    return any(part.node is loop for part in parts) or any(
        loop in script.ancestors(call) for call in calls
    )


MOST_BY_PLACE = 5
"""Arguments of a `DataLoader` before its number of workers."""


OF_WORKERS = frozenset({"persistent_workers", "prefetch_factor"})


def _loader_edits(
    script: Script, parts: Sequence[StepPart], arguments: Mapping[str, str]
) -> list[Edit | None]:
    edits: list[Edit | None] = []
    for call in _loaders(script, parts):
        if has_unpacked(call) or len(call.args) > MOST_BY_PLACE:
            return [None]  # it may be given what is to be added
        needs_workers = OF_WORKERS & set(arguments) and "num_workers" not in arguments
        if needs_workers and worker_count(call) == 0:
            continue  # torch refuses it to a loader without workers
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
    # More than a device may be given by position, or by what is not written here.
    moves = [move for loop in loops for move in copies(script, loop) if len(move.args) < 2]
    return [set_argument(script, move, name, value) for move in moves if not has_unpacked(move)]


def _optimizer_edits(script: Script, form: SourceForm) -> list[Edit | None]:
    stepped = {
        id(each)
        for call in script.methods("step")
        if is_optimizer_step(script, call)
        for each in script.origins(call.func.value)  # type: ignore[attr-defined]
    }
    made = [
        call
        for call in script.calls("torch.optim.")
        if script.called(call).rpartition(".")[2] in form.optimizers
    ]
    used = [call for call in made if id(call) in stepped] or (made if len(made) == 1 else [])
    if any(map(has_unpacked, used)):
        return [None]
    edits = [
        set_argument(script, call, name, value)
        for call in used
        for name, value in form.optimizer.items()
    ]
    # Torch refuses both of them at once.
    rivals = {"fused", "foreach"} - form.optimizer.keys()
    given = [argument(call, name) for call in used for name in rivals]
    return [*edits, *(replaced(script, each, "None") for each in given if each)] or [None]


def _start_edit(script: Script, line: str) -> Edit | None:
    """Return the line after the imports, None where the script sets the same elsewhere itself."""
    name = line.partition("(")[0].partition(" = ")[0]
    stored = [each for each in script.nodes(ast.Attribute) if isinstance(each.ctx, ast.Store)]
    if script.calls(name) or any(script.qualified(each) == name for each in stored):
        return None  # the last one counts
    return insert_after_import(script, "torch", line)


def _model_edit(
    script: Script, part: StepPart, form: SourceForm, values: Mapping[str, str]
) -> Edit | None:
    """Return the line above the outermost loop around the steps, in the model's own function."""
    found = _model(script, part)
    if found is None or not isinstance(found.func, ast.Name):
        return None
    made = script.values(found.func)
    if not made or any(isinstance(value, ast.arg) for value in made):
        return None  # handed in: the line belongs where it was made
    inside = {each for value in made for each in (value, *script.ancestors(value))}
    # A loop over folds or rates makes a model in each round.
    loops = [each for each in [part.node, *script.loops(part.node)] if each not in inside]
    if not loops or not isinstance(loops[-1], ast.For | ast.While):
        return None
    outermost = loops[-1]
    text = Template(form.model).substitute(values, model=found.func.id)
    is_in_vain = form.needs_own_forward and any(has_torchs_forward(script, x) for x in made)
    if is_in_vain or ("torch." in text and not script.knows("torch", outermost)):
        return None
    return insert_before(script, outermost, text)


def has_torchs_forward(script: Script, made: ast.AST) -> bool:
    """Return whether a model is made of a class that leaves `forward` to one of `torch.nn`."""
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute):
        if script.called(made):
            break
        made = made.func.value  # `.to(device)`
    if not isinstance(made, ast.Call):
        return False
    owner = script.classes.get(last_name(made.func))
    if owner is None:
        return bool(TORCHS.match(script.called(made)))
    has_own = script.method(owner, "forward") is not None
    return not has_own and any(TORCHS.match(base) for base in script.bases(owner))


TORCHS = re.compile(r"torch\.nn\.(?!Module$)(?!\w*Parallel$)[A-Z]\w*$")
"""Layers and containers of torch, each with a `forward`."""


def _model(script: Script, part: StepPart) -> ast.Call | None:
    """Return the one call of a model in a step, None where there are none or several."""
    names = models(script)
    calls = [
        call for call in script.within(part.node, ast.Call) if script.source(call.func) in names
    ]
    return calls[0] if len({script.source(call.func) for call in calls}) == 1 else None


REFUSED = frozenset({"BCELoss", "binary_cross_entropy"})
"""What torch refuses to compute under autocast on a GPU."""


def _forward_edits(script: Script, part: StepPart, header: str) -> list[Edit | None]:
    """Return the block from the model's call to the loss, all before `backward`."""
    call = _model(script, part)
    if call is None or len(part.backwards) != 1 or not script.knows("torch", call):
        return [None]
    first = script.statement(call)
    last = script.statement(part.backwards[0])
    block = script.block(first)
    places = {id(each): i for i, each in enumerate(block)}
    if id(last) not in places or places[id(first)] >= places[id(last)]:
        return [None]
    body = block[places[id(first)] : places[id(last)]]
    loss = names_in(part.backwards[0]) - {"self", "backward"}
    # What has nothing to do with the loss, as zero_grad has, stays outside at the end.
    while len(body) > 1 and not names_in(body[-1]) & loss:
        body.pop()
    if REFUSED & script.words or _goes_to_numpy(script, part, body, loss) or _multiplies(body):
        return [None]
    device = _device_type(script, part, script.source(call.func))
    return wrap(script, body, Template(header).substitute(device=device))


PRODUCTS = frozenset({"matmul", "mm", "bmm", "einsum", "addmm", "baddbmm", "tensordot"})
"""What autocast computes in bf16, and the technique, in a loss, does not."""


def _multiplies(body: Sequence[ast.stmt]) -> bool:
    """Return whether products of the script's own are among what would be under autocast."""
    nodes = [node for each in body for node in ast.walk(each)]
    return any(
        isinstance(node, ast.MatMult)
        or (isinstance(node, ast.Call) and last_name(node.func) in PRODUCTS)
        for node in nodes
    )


NOT_HALF = frozenset({"argmax", "max", "topk", "float", "double", "int", "long", "item", "round"})
"""What makes whole numbers or fp32 of an output."""


def _goes_to_numpy(
    script: Script, part: StepPart, body: Sequence[ast.stmt], loss: Collection[str]
) -> bool:
    """Return whether a step hands to NumPy, which has no bf16, what is computed in the block."""
    stored = (node for each in body for node in ast.walk(each) if isinstance(node, ast.Name))
    made = {node.id for node in stored if isinstance(node.ctx, ast.Store)} - set(loss)
    for each in script.within(part.node, ast.Assign):
        used = names_in(each.value)
        if used & made and not used & NOT_HALF:
            made |= {name for target in each.targets for name in names_in(target)}
    calls = (call for call in script.methods("numpy") if part.node in script.ancestors(call))
    read = [names_in(call.func) for call in calls]
    return any(names & made and not names & NOT_HALF for names in read)


def _device_type(script: Script, part: StepPart, model: str) -> str:
    """Return an expression for the kind of device that a step runs on."""
    moves = copies(script, part.node) if isinstance(part.node, ast.For) else []
    for move in moves:
        device = argument(move, "device", 0)
        if isinstance(device, ast.Constant) and isinstance(device.value, str):
            return f'"{device.value.partition(":")[0]}"'
        if device is None or isinstance(device, ast.Constant):
            return '"cuda"'
        text = script.source(device)
        is_device = {script.called(each) for each in script.values(device)} == {"torch.device"}
        return f"{text}.type" if is_device else f"torch.device({text}).type"
    return f"next({model}.parameters()).device.type" if uses_device(script) else '"cpu"'


def _block_edits(script: Script, function: str) -> list[Edit | None]:
    """Return the calls of blocks in `for block in self.blocks: x = block(x)`, each in another call.

    Batch norm would count each batch twice, so that a file with one has no clear place.
    """
    if any("BatchNorm" in w for w in script.words):
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
    return [insert_after_import(script, "torch", f"import {module}"), *edits] if edits else [None]


def _checkpointed(script: Script, call: ast.Call, function: str) -> list[Edit | None]:
    start, _end = script.span(call)
    name_end = script.span(call.func)[1]
    opening = script.text.index("(", name_end) + 1
    first = Edit(start=start, end=opening, text=f"{function}({script.source(call.func)}, ")
    return [first, add_argument(script, call, "use_reentrant=False")]
