"""Where a script trains: its backward calls, the part that runs once a step, evaluation, tensors.

A step's part is the innermost loop with both `backward` and an optimizer's `step`, or the function
with them that a loop calls. Nothing is run, so all of this is what the text shows: a training that
is spread over files is not seen, and rules say nothing about it.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from flatout.analysis.source.script import (
    Function,
    Loop,
    Script,
    argument,
    constant,
    last_name,
    names_in,
    root_name,
)

TAKES_LOSS = frozenset({"accelerator", "fabric", "engine", "model_engine", "self", "autograd"})
"""Receivers of `x.backward(loss)`."""
PERIODIC = re.compile(
    r"log|print|verbose|debug|interval|every|freq|period|step|iter|batch_idx|last|final|nan|finite"
    r"|best|warm|profil|count|\bi\b|idx",
    re.IGNORECASE,
)
"""Words of a condition that does not hold in every step."""
DEVICE = re.compile(r"device|cuda|gpu|rank", re.IGNORECASE)
READS = frozenset(
    {"item", "cpu", "numpy", "tolist", "detach_to_host", "size", "dim", "numel", "nelement"}
    | {"is_contiguous", "is_floating_point", "is_complex", "get_device", "stride"}
)
"""Methods whose result is no tensor on the device."""
WITHOUT_GRAPH = frozenset(["detach", "data", "argmax", "max", "topk", "no_grad", "eq", "sign"])
DESCRIBES = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "is_cuda"})
STEPPED = re.compile(r"opt|scaler", re.IGNORECASE)
ASKS_CUDA = re.compile(r"torch\.cuda\.(manual_seed\w*|is_available|device_count)")
"""Calls of scripts that train on the CPU, too."""
SETTINGS = frozenset({"self", "args", "opt", "config", "cfg", "hparams", "params", "flags"})
"""Owners whose `.device` was chosen; that of any other name is a tensor's or a model's own."""
NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.set_grad_enabled")


@dataclass(frozen=True, slots=True)
class StepPart:
    """The part of a script that runs once a training step."""

    node: Loop | Function
    backwards: tuple[ast.Call, ...]
    tensors: frozenset[str]
    """Names of tensors that this part computes on the device: losses, outputs."""


def backward_loss(  # noqa: PLR0911  one kind of call a line
    script: Script, call: ast.Call
) -> ast.expr | None:
    """Return the loss of a call of `backward`, None where it is no training's."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
        return None
    owner = call.func.value
    if isinstance(owner, ast.Call) and root_name(owner) == "super":
        return None
    name = script.qualified(call.func)
    if name and name != "torch.autograd.backward":
        return None
    if call.args and (last_name(owner) in TAKES_LOSS or name):
        return call.args[0]
    if call.args and "loss" in script.source(call.args[0]) and "loss" not in script.source(owner):
        return call.args[0]  # an engine, whatever its name
    if isinstance(owner, ast.Name) and owner.id in TAKES_LOSS | {"ctx"}:
        return None
    return owner


def loss_names(loss: ast.expr) -> set[str]:
    """Return the names of what a backward starts from: of `scaler.scale(loss / steps)` the loss."""
    if isinstance(loss, ast.Call) and last_name(loss.func) == "scale" and loss.args:
        return loss_names(loss.args[0])
    if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Add | ast.Sub):
        return loss_names(loss.left) | loss_names(loss.right)
    match loss:
        case (
            ast.BinOp(left=inner, op=ast.Div())
            | ast.BinOp(left=ast.Constant(), op=ast.Mult(), right=inner)
            | ast.BinOp(left=inner, op=ast.Mult(), right=ast.Constant())
        ):
            return loss_names(inner)
    made = (each.func for each in ast.walk(loss) if isinstance(each, ast.Call))
    called = {func.id for func in made if isinstance(func, ast.Name)}
    return {root_name(loss)} - {"", "self", "scaler"} - called


def backwards(script: Script) -> list[ast.Call]:
    """Return the calls that run a backward pass."""
    found = script.methods("backward")
    return [call for call in found if backward_loss(script, call) is not None]


def optimizer_steps(script: Script, root: ast.AST) -> list[ast.Call]:
    """Return the calls below a node that step an optimizer, directly or through a scaler."""
    return [call for call in script.within(root, ast.Call) if is_optimizer_step(script, call)]


def trains(script: Script) -> bool:
    """Return whether a file steps an optimizer anywhere; gradients alone are no training."""
    return any(is_optimizer_step(script, call) for call in script.methods("step"))


def is_optimizer_step(script: Script, call: ast.Call) -> bool:
    """Return whether a call steps an optimizer: by where its name comes from, or by its name."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    owner = call.func.value
    made = script.called(script.origin(owner))
    if made.startswith("torch.optim."):
        return not made.startswith("torch.optim.lr_scheduler.")
    return bool(STEPPED.search(script.source(owner))) and "sched" not in script.source(owner)


@functools.lru_cache(maxsize=1)  # a dozen rules ask for those of one script
def step_parts(script: Script) -> list[StepPart]:
    """Return what runs once a step, one for each loop or function that has a backward."""
    found: dict[ast.AST, list[ast.Call]] = {}
    for call in backwards(script):
        node = _part_of(script, call)
        if node is not None:
            found.setdefault(node, []).append(call)
    return [
        StepPart(node, tuple(calls), frozenset(device_tensors(script, node, calls)))  # type: ignore[arg-type]
        for node, calls in found.items()
    ]


def _part_of(script: Script, call: ast.Call) -> ast.AST | None:
    loops = script.loops(call)
    for loop in loops:
        if optimizer_steps(script, loop):
            return loop
    function = script.function(call)
    if loops and (function is None or not optimizer_steps(script, function)):
        return loops[0]
    if loops:
        return None  # micro-batches within one step: what is outside of them runs once a step, too
    if function is not None and any(script.loops(each) for each in script.calls_of(function)):
        return function
    return None


def runs_every_step(  # noqa: PLR0911  one obstacle a line
    script: Script, node: ast.AST, part: StepPart
) -> bool:
    """Return whether a node of a step's part runs in each step, as far as conditions tell."""
    child = node
    for ancestor in script.ancestors(node):
        is_branch = isinstance(ancestor, ast.If | ast.IfExp) and child is not ancestor.test
        if is_branch and is_periodic(script, ancestor.test):  # type: ignore[attr-defined]
            return False
        if isinstance(ancestor, ast.ExceptHandler | ast.Lambda):
            return False
        if isinstance(child, ast.stmt) and _is_after_skip(script, child):
            return False
        if ancestor is part.node:
            once = [getattr(ancestor, "iter", None), *getattr(ancestor, "orelse", [])]
            return not any(child is each for each in once)
        if isinstance(ancestor, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return False
        child = ancestor
    return False


def is_periodic(script: Script, test: ast.AST) -> bool:
    """Return whether a condition may be one of every n-th step or of rare events."""
    if any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod) for each in ast.walk(test)):
        return True
    return bool(PERIODIC.search(script.source(test)))


def _is_after_skip(script: Script, statement: ast.stmt) -> bool:
    """Return whether an `if ...: continue` before a statement skips it in some steps."""
    for each in script.block(statement):
        if each is statement:
            return False
        if isinstance(each, ast.If) and isinstance(
            each.body[-1], ast.Continue | ast.Break | ast.Return
        ):
            return True
    return False


def uses_device(script: Script) -> bool:
    """Return whether the script moves anything to a device other than the CPU."""
    text = ASKS_CUDA.sub("", script.text)
    if "cuda" in text or "accelerat" in text:
        return True
    named = [each.value for each in script.nodes(ast.keyword) if each.arg == "device"]
    moves = (call for call in script.methods("cuda", "to") if is_device_move(script, call))
    named += [value for call in moves for value in call.args[:1]]
    return any(is_device(script, value) and not _is_of_tensor(value) for value in named)


def _is_of_tensor(device: ast.expr) -> bool:
    """Return whether a device is that of a tensor or a model, wherever that is."""
    if not isinstance(device, ast.Attribute) or device.attr != "device":
        return False
    return root_name(device).lower() not in SETTINGS


def is_device_move(script: Script, node: ast.AST) -> bool:
    """Return whether a call copies a tensor or a module to a device that may be a GPU."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "cuda":
        return not script.qualified(node.func)
    if node.func.attr != "to":
        return False
    target = argument(node, "device", 0)
    return target is not None and is_device(script, target)


def is_device(script: Script, target: ast.expr) -> bool:
    """Return whether an expression names a device other than the CPU."""
    value = constant(target)
    if isinstance(value, str):
        return value.split(":")[0] in {"cuda", "mps", "xpu", "gpu"}
    made = script.origin(target)
    if script.called(made) == "torch.device" or isinstance(constant(made), str):
        return "cpu" not in script.source(made) or "cuda" in script.source(made)
    if isinstance(made, ast.IfExp):
        return "cuda" in script.source(made)
    return bool(DEVICE.search(script.source(target))) and "dtype" not in script.source(target)


def models(script: Script) -> set[str]:
    """Return the text of what is used as a model: it has modes, parameters or a state."""
    found = {
        script.source(call.func.value)  # type: ignore[attr-defined]
        for call in script.methods("train", "eval", "parameters", "named_parameters")
    }
    return {each for each in found if len(each) < 40}


def device_tensors(script: Script, part: ast.AST, calls: list[ast.Call]) -> set[str]:
    """Return the names of tensors on the device that a step's part computes.

    It starts from the losses and what the model returns, and follows arithmetic, methods of
    tensors and functions of torch. What another function makes of a tensor may be a number.
    """
    losses = (backward_loss(script, call) for call in calls)
    known = {name for loss in losses if loss is not None for name in loss_names(loss)}
    called = models(script)
    assigned = [(t, each.value) for each in script.within(part, ast.Assign) for t in each.targets]
    assigned += [(each.target, each.value) for each in script.within(part, ast.AugAssign)]
    for _ in range(3):  # a chain of three assignments against the order of the text is rare
        before = len(known)
        for target, value in assigned:
            is_output = isinstance(value, ast.Call) and script.source(value.func) in called
            if is_output or is_tensor(script, value, known):
                elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                known |= {each.id for each in elements if isinstance(each, ast.Name)}
        if len(known) == before:
            break
    return known - {"_"}


def is_tensor(  # noqa: PLR0911  one kind of expression a line
    script: Script, node: ast.AST, known: set[str] | frozenset[str]
) -> bool:
    """Return whether an expression is a tensor on the device, given names of such tensors."""
    match node:
        case ast.Name():
            return node.id in known and not _is_read(script, node)
        case ast.Attribute():
            return node.attr not in DESCRIBES and is_tensor(script, node.value, known)
        case ast.Subscript() | ast.Starred():
            return is_tensor(script, node.value, known)
        case ast.UnaryOp():
            return not isinstance(node.op, ast.Not) and is_tensor(script, node.operand, known)
        case ast.BinOp():
            return is_tensor(script, node.left, known) or is_tensor(script, node.right, known)
        case ast.Compare():
            inner = [node.left, *node.comparators]
            by_value = not any(
                isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops
            )
            return by_value and any(is_tensor(script, each, known) for each in inner)
        case ast.Call():
            return _is_tensor_call(script, node, known)
    return False


def _is_read(script: Script, name: ast.Name) -> bool:
    """Return whether the last value of a name is a number, as after `loss = loss.item()`."""
    made = script.origin(name)
    return isinstance(made, ast.Call) and last_name(made.func) in {*READS, "float", "int", "len"}


def _is_tensor_call(script: Script, call: ast.Call, known: set[str] | frozenset[str]) -> bool:
    name = script.qualified(call.func)
    if name.startswith("torch."):
        return not name.startswith(("torch.cuda.", "torch.is_", "torch.distributed.")) and any(
            is_tensor(script, each, known) for each in call.args
        )
    if not isinstance(call.func, ast.Attribute) or call.func.attr in READS:
        return False
    if call.func.attr == "to" and call.args and constant(call.args[0]) == "cpu":
        return False
    return is_tensor(script, call.func.value, known)


def has_graph(script: Script, node: ast.AST, known: set[str] | frozenset[str]) -> bool:
    """Return whether an expression is a tensor that holds on to the graph it came from."""
    made = script.origin(node)
    if isinstance(made, ast.Call) and last_name(made.func) == "detach":
        return False  # `loss = loss.detach()` came in between
    return is_tensor(script, node, known) and not names_in(node) & WITHOUT_GRAPH


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A loop that runs a model in evaluation mode and never trains in it."""

    loop: Loop
    model: str
    """The model, as written."""


def evaluations(script: Script) -> list[Evaluation]:
    """Return the loops that call a model after `model.eval()`, without any backward."""
    found = []
    for call in script.methods("eval"):
        if call.args or script.qualified(call.func) or not isinstance(call.func, ast.Attribute):
            continue
        model = script.source(call.func.value)
        place = script.function(call) or script.tree
        found += [
            Evaluation(loop, model)
            for loop in script.within(place, ast.For)
            if loop.lineno > call.lineno and _evaluates(script, loop, model, call)
        ]
    outer = {id(each.loop) for each in found}
    return [each for each in found if not any(id(a) in outer for a in script.ancestors(each.loop))]


def _evaluates(script: Script, loop: ast.For, model: str, mode: ast.Call) -> bool:
    inner = list(script.within(loop, ast.Call))
    if not any(script.source(call.func) == model for call in inner):
        return False
    words = {last_name(call.func) for call in inner}
    if words & {"backward", "train", "grad", "requires_grad_", "step"}:
        return False
    # The mode must hold for the loop: not one branch of many, not switched back in between.
    if script.loops(mode) != script.loops(loop):
        return False
    between = (c.lineno for c in script.methods("train") if script.source(c.func.value) == model)  # type: ignore[attr-defined]
    return not any(mode.lineno < line < loop.lineno for line in between)


def is_without_gradients(script: Script, node: ast.AST) -> bool:
    """Return whether a node runs under `no_grad` or the like, directly or through its callers."""
    if _is_off_around(script, node):
        return True
    for ancestor in script.ancestors(node):
        if isinstance(ancestor, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(_turns_off(script, each) for each in ancestor.decorator_list):
                return True
            if any(_is_off_around(script, call) for call in script.calls_of(ancestor)):
                return True
    return any(
        constant(argument(call, "mode", 0)) is False
        for call in script.calls("torch.set_grad_enabled")
    )


def _is_off_around(script: Script, node: ast.AST) -> bool:
    return any(
        _turns_off(script, item.context_expr)
        for each in script.ancestors(node)
        if isinstance(each, ast.With | ast.AsyncWith)
        for item in each.items
    )


def _turns_off(script: Script, node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else node
    name = script.qualified(called)
    return name in NO_GRAD or last_name(called) in {"no_grad", "inference_mode", "set_grad_enabled"}


def accumulation(script: Script, part: StepPart) -> tuple[ast.If, ast.expr, ast.expr] | None:
    """Return the `if` that lets the optimizer step every n-th time, the counter and the n.

    An `if` with the backward in it, too, trains on every n-th batch: nothing is accumulated.
    """
    trained = {ancestor for call in part.backwards for ancestor in script.ancestors(call)}
    for step in optimizer_steps(script, part.node):
        for ancestor in script.ancestors(step):
            if ancestor is part.node or ancestor in trained:
                break
            if isinstance(ancestor, ast.If) and (found := modulo(ancestor.test)) is not None:
                return ancestor, *found
    return None


def modulo(test: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """Return counter and period of the first `counter % period` in a condition."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return node.left, node.right
    return None


def train_loaders(script: Script) -> Iterator[ast.Call]:
    """Yield the calls of `DataLoader`."""
    yield from script.calls("torch.utils.data.DataLoader")


def loops_over(script: Script, loader: ast.Call) -> list[ast.For]:
    """Return the `for` loops that draw batches from a loader made in this file."""
    return [
        loop
        for loop in script.nodes(ast.For)
        if any(loader in script.origins(each) for each in _iterated(loop.iter))
    ]


def _iterated(node: ast.expr) -> Iterator[ast.expr]:
    """Yield an iterable and what `enumerate`, `tqdm` and the like are given to iterate."""
    yield node
    if isinstance(node, ast.Call):
        for each in node.args:
            yield from _iterated(each)


def copies(script: Script, loop: ast.For) -> list[ast.Call]:
    """Return the copies to a device of what a loop draws."""
    drawn = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    # `for i, data in enumerate(loader): x, y = data`
    for each in script.within(loop, ast.Assign):
        if root_name(each.value) in drawn and isinstance(each.value, ast.Name | ast.Subscript):
            drawn |= {n.id for t in each.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    # `{name: value.to(device) for name, value in batch.items()}`
    parts: list[ast.For | ast.comprehension] = [*script.within(loop, ast.For)]
    for part in [*parts, *script.within(loop, ast.comprehension)]:
        if root_name(part.iter) in drawn:
            drawn |= {n.id for n in ast.walk(part.target) if isinstance(n, ast.Name)}
    moved = [call for call in script.within(loop, ast.Call) if is_device_move(script, call)]
    return [call for call in moved if root_name(call.func) in drawn]


def divides_by(node: ast.AST, number: ast.expr) -> bool:
    """Return whether something below a node is divided by a number, by its last name."""
    wanted = last_name(number) or str(constant(number))
    for each in ast.walk(node):
        if isinstance(each, ast.BinOp | ast.AugAssign) and isinstance(each.op, ast.Div):
            divisor = each.right if isinstance(each, ast.BinOp) else each.value
            text = names_in(divisor) | {
                str(n.value) for n in ast.walk(divisor) if isinstance(n, ast.Constant)
            }
            if wanted in text:
                return True
    return False


MAP = "torch.utils.data.Dataset"
ITERABLE = "torch.utils.data.IterableDataset"


def dataset_classes(script: Script, *bases: str) -> list[ast.ClassDef]:
    """Return the classes of the file that derive from one of torch's data sets."""
    wanted = set(bases) or {MAP, ITERABLE}
    return [owner for owner in script.nodes(ast.ClassDef) if script.bases(owner) & wanted]


def worker_functions(script: Script) -> Iterator[tuple[Function, str]]:
    """Yield what runs in a worker process: how samples are read, and functions that collate."""
    for owner in dataset_classes(script):
        for name in ("__getitem__", "__iter__", "__getitems__"):
            if (function := script.method(owner, name)) is not None:
                yield function, f"{owner.name}.{name}"
    for call in script.calls("torch.utils.data.DataLoader"):
        collate = argument(call, "collate_fn", 6)
        name = last_name(collate)
        if isinstance(collate, ast.Name) and name in script.functions:
            yield script.functions[name], name


def worker_count(call: ast.Call) -> object:
    """Return a loader's number of workers where it is written as a number, else None."""
    workers = argument(call, "num_workers", 5)
    return 0 if workers is None else constant(workers)


def may_have_workers(call: ast.Call) -> bool:
    """Return whether a loader is given workers: a number above 0, or a value from elsewhere."""
    return argument(call, "num_workers", 5) is not None and worker_count(call) != 0
