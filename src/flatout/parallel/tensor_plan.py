"""Tensor parallelism of a Task's model: a plan, its proof, and what applies it.

A plan names a style for modules. It is the user's, or the model's own, or derived: a product whose
input comes from other products only, through what treats each feature alike, takes rows, and those
others columns. Whatever it comes from, each kind of block is run with it in double precision on the
ranks that will use it, and its output and gradients are compared with the plain block's.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from flatout.parallel.engines import eval_mode, whole_of
from flatout.records.errors import UserError, unknown
from flatout.records.parallel import TP_STYLES

PROVEN = 1e-10
"""Largest relative difference of a block's output and gradients, in double precision."""
PROVEN_SINGLE = 1e-4
"""The same of a block whose own code computes in lower precision, as norms often do."""
HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "n_heads", "n_head", "nhead")
"""What modules and configurations call the number of heads."""
ALIASES = {
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "rowwise",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "replicate",
}
"""Words of Transformers' plans for ours."""
FEATURE_WISE = frozenset(
    {
        *(F.silu, F.gelu, F.relu, F.dropout, F.mish, F.softplus, F.scaled_dot_product_attention),
        *(torch.relu, torch.sigmoid, torch.tanh, torch.mul),
    }
)
"""Functions that treat each feature, or each head, alone."""
METHODS = frozenset(
    {"view", "reshape", "transpose", "permute", "contiguous", "unflatten", "flatten", "mul", "to"}
)
ACTIVATIONS = (nn.SiLU, nn.GELU, nn.ReLU, nn.Dropout, nn.Identity, nn.Sigmoid, nn.Tanh, nn.Mish)
OPERATORS = frozenset({"mul", "getattr", "getitem"})


class _LinearsAsLeaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_norm = "norm" in type(m).__name__.lower()
        return is_norm or super().is_leaf_module(m, module_qualified_name)


def derive_plan(block: nn.Module) -> dict[str, str]:
    """Return the styles of a block's products, by their names in it; empty where none is safe.

    Raises:
        Exception: of any kind, from tracing code that cannot be traced.
    """
    graph = _LinearsAsLeaves().trace(block)
    modules = dict(block.named_modules())
    plan: dict[str, str] = {}
    for node in graph.nodes:
        if not _is_product(node, modules) or node.target in plan:
            continue
        sources = _sources_of(node, modules)
        names = [str(one.target) for one in sources]
        if names and not any(name in plan for name in names):
            plan |= dict.fromkeys(names, "colwise")
            plan[str(node.target)] = "rowwise"
    return plan


def _is_product(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    return node.op == "call_module" and isinstance(modules[str(node.target)], nn.Linear)


def _sources_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> list[fx.Node]:
    """Return the products that a product's input is made of alone; empty where there is more."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    waiting = [one for one in node.all_input_nodes if not _is_size(one)]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if _is_product(one, modules):
            found[one] = None
        elif _is_feature_wise(one, modules):
            waiting += [other for other in one.all_input_nodes if not _is_size(other)]
        else:
            return []
    inside = seen | {node}
    leaks = any(user not in inside and not _is_size(user) for one in seen for user in one.users)
    return [] if leaks else list(found)


def _is_size(node: fx.Node) -> bool:
    """Return whether a node is a shape or a number of one."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if name == "getattr":
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    return bool(node.all_input_nodes) and all(map(_is_size, node.all_input_nodes))


def _is_feature_wise(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], ACTIVATIONS)
    if node.op == "call_method":
        return node.target in METHODS
    return node.op == "call_function" and (
        node.target in FEATURE_WISE or getattr(node.target, "__name__", "") in OPERATORS
    )


def own_plan_of(root: nn.Module) -> dict[str, str]:
    """Return the plan that a model brings, as those of Transformers do; empty where there is none.

    Raises:
        UserError: where it names a style that is not offered.
    """
    found: dict[str, str] = {}
    for name, module in root.named_modules():
        plan = getattr(module, "_tp_plan", None) or getattr(module, "base_model_tp_plan", None)
        if not isinstance(plan, Mapping):
            continue
        prefix = f"{name}." if name else ""
        for key, style in plan.items():
            known = ALIASES.get(style, style)
            if known not in TP_STYLES:
                raise UserError(
                    f"the model's own plan: {key}: {unknown('style', style, TP_STYLES)}; "
                    "give a tp_plan in [parallel]"
                )
            found.setdefault(prefix + key, known)
    return found


def named(plan: Mapping[str, str], root: nn.Module, *, is_users: bool) -> dict[str, str]:
    """Return the style of each module that a plan's patterns name.

    Raises:
        UserError: where a pattern of the user's names none.
    """
    found: dict[str, str] = {}
    names = [name for name, _ in root.named_modules()]
    for pattern, style in plan.items():
        parts = (r"[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
        wanted = re.compile(r"\.".join(parts))
        matches = [name for name in names if wanted.fullmatch(name)]
        if not matches and is_users:
            raise UserError(f"parallel.tp_plan: {unknown('module', pattern, names[1:])}")
        found |= dict.fromkeys(matches, style)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """The styles of a whole model's modules."""

    styles: Mapping[str, str]
    source: str
    """`yours`, `the model's own`, or `derived`."""
    splits_sequence: bool
    splits_loss: bool


def plan_for(
    root: nn.Module, blocks: Sequence[str], degree: int, given: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """Return the styles of a model's modules, and where they come from.

    Raises:
        UserError: where there are none that can work.
    """
    check_heads(root, degree)
    if given:
        styles, source = named(given, root, is_users=True), "yours"
    else:
        tied, source = _tied_modules(root), "the model's own"
        own = named(own_plan_of(root), root, is_users=False)
        styles = {name: style for name, style in own.items() if name not in tied}
    if not styles:
        styles, source = _derived(root, blocks, degree), "derived"
    for name, style in styles.items():
        _check_features(name, root.get_submodule(name), style, degree)
    return styles, source


def check_heads(root: nn.Module, degree: int) -> None:
    """Refuse a degree that does not divide the heads of the model.

    Raises:
        UserError: with a degree that does.
    """
    for name, module in root.named_modules():
        for holder in (module, getattr(module, "config", None)):
            for key in HEADS:
                heads = getattr(holder, key, None)
                if type(heads) is int and heads % degree:
                    where = f"{name}.{key}" if name else key
                    raise UserError(
                        f"tp={degree} does not divide the heads: {where}={heads}; "
                        f"give tp={math.gcd(heads, degree)}"
                    )


def _derived(root: nn.Module, blocks: Sequence[str], degree: int) -> dict[str, str]:
    styles: dict[str, str] = {}
    why = ""
    for name in blocks or [""]:
        try:
            found = derive_plan(root.get_submodule(name))
        except Exception as error:  # noqa: BLE001  tracing runs any code of the model's
            why = f" ({type(error).__name__}: {str(error).splitlines()[0]})" if str(error) else ""
            continue
        styles |= {f"{name}.{key}" if name else key: style for key, style in found.items()}
    if not styles:
        kind = type(root.get_submodule(blocks[0] if blocks else "")).__name__
        raise UserError(
            f"tp={degree}: no plan can be derived for {kind}{why}; give one in "
            "[parallel.tp_plan], or leave tp at 1"
        )
    tied = _tied_modules(root)
    for name, module in root.named_modules() if blocks else ():
        if name in tied or name in blocks or _is_below(name, blocks):
            continue
        if isinstance(module, nn.Linear) and module.out_features % degree == 0:
            styles[name] = "colwise_gather"
        elif (
            type(module) is nn.Embedding
            and module.num_embeddings % degree == 0
            and module.max_norm is None
            and not module.sparse
        ):
            styles[name] = "rowwise"
    return styles


def _is_below(name: str, holders: Iterable[str]) -> bool:
    """Return whether a module is inside of one of these; the one without a name holds all."""
    return any(not one or name.startswith(f"{one}.") for one in holders)


def _tied_modules(root: nn.Module) -> set[str]:
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {name for names in by_tensor.values() if len(names) > 1 for name in names}


def _check_features(name: str, module: nn.Module, style: str, degree: int) -> None:
    kind = type(module).__name__
    sizes = {
        "colwise": "out_features",
        "colwise_gather": "out_features",
        "rowwise": "num_embeddings" if isinstance(module, nn.Embedding) else "in_features",
    }
    if style not in sizes:
        return
    size = getattr(module, sizes[style], None)
    if size is None:
        raise UserError(f"tp_plan: {name} is a {kind}, which has no style {style}")
    if size % degree:
        raise UserError(f"tp={degree} does not divide {name} ({sizes[style]}={size})")


def _torch_styles(
    part: nn.Module, plan: TensorPlan, blocks: Sequence[str], wanted: Mapping[str, str]
) -> dict[str, ParallelStyle]:
    """Return torch's styles for the modules of a part."""
    held = dict(part.named_modules())
    last = [name for name, style in wanted.items() if style == "colwise_gather"][-1:]
    found: dict[str, ParallelStyle] = {}
    for name, style in wanted.items():
        if style == "colwise":
            found[name] = ColwiseParallel()
        elif style == "rowwise" and isinstance(held[name], nn.Embedding):
            found[name] = RowwiseParallel(input_layouts=Replicate())
        elif style == "rowwise":
            splits = plan.splits_sequence and _is_below(name, blocks)
            found[name] = RowwiseParallel(output_layouts=Shard(1) if splits else Replicate())
        elif style == "colwise_gather" and plan.splits_loss and [name] == last:
            found[name] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        elif style == "colwise_gather":
            found[name] = ColwiseParallel(output_layouts=Replicate())
    if plan.splits_sequence:
        found |= {name: SequenceParallel() for name in _on_split_sequence(part, blocks, wanted)}
    return found


def _groups(blocks: Sequence[str], wanted: Mapping[str, str], part: nn.Module) -> set[str]:
    """Return the modules that hold products which need the whole sequence.

    Raises:
        UserError: where they are directly in a block, so nothing is between them and its norms.
    """
    rows = [name for name, style in wanted.items() if style == "rowwise"]
    groups = {name.rpartition(".")[0] for name in rows if _is_below(name, blocks)}
    if groups & {*blocks}:
        raise UserError(
            f"sequence_parallel: products are directly in a block of {type(part).__name__}, not "
            "in modules of their own: leave it out"
        )
    return groups


def _on_split_sequence(
    part: nn.Module, blocks: Sequence[str], wanted: Mapping[str, str]
) -> list[str]:
    """Return the modules with parameters that see a part of the sequence: norms, mostly."""
    groups = _groups(blocks, wanted, part)
    return [
        name
        for name, module in part.named_modules()
        if name not in blocks
        and _is_below(name, blocks)
        and any(True for _ in module.parameters(recurse=False))
        and name not in groups
        and not _is_below(name, groups)
    ]


def apply_plan(
    part: nn.Module, plan: TensorPlan, blocks: Sequence[str], mesh: DeviceMesh, prefix: str = ""
) -> None:
    """Split a part's products over the ranks of a mesh, in place."""
    wanted = {
        name: plan.styles[prefix + name]
        for name, _ in part.named_modules()
        if name and prefix + name in plan.styles
    }
    styles = _torch_styles(part, plan, blocks, wanted)
    if styles:
        parallelize_module(part, mesh, styles)
    if plan.splits_sequence and blocks:
        for name in _groups(blocks, wanted, part):
            _redistribute_input(part.get_submodule(name), mesh, Shard(1), Replicate())
        first, last = part.get_submodule(blocks[0]), part.get_submodule(blocks[-1])
        _redistribute_input(first, mesh, Replicate(), Shard(1))
        last.register_forward_hook(
            lambda _module, _args, output: _change_first(
                output, lambda x: _redistributed(x, mesh, Shard(1), Replicate()).to_local()
            )
        )


def _redistribute_input(
    module: nn.Module, mesh: DeviceMesh, found: Placement, wanted: Placement
) -> None:
    """Let a module have its first tensor in another layout; a whole one stays a DTensor."""

    def change(x: torch.Tensor) -> torch.Tensor:
        result = _redistributed(x, mesh, found, wanted)
        return result if isinstance(wanted, Replicate) else result.to_local()

    module.register_forward_pre_hook(
        lambda _module, args, kwargs: _change_first((args, kwargs), change), with_kwargs=True
    )


def _redistributed(
    x: torch.Tensor, mesh: DeviceMesh, found: Placement, wanted: Placement
) -> DTensor:
    if isinstance(wanted, Shard) and x.shape[wanted.dim] % mesh.size():
        raise UserError(
            f"sequence_parallel: tp={mesh.size()} does not divide a sequence of "
            f"{x.shape[wanted.dim]}"
        )
    known = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (found,), run_check=False)
    return known.redistribute(mesh, (wanted,))


def _change_first(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a structure with its first tensor of numbers changed."""
    leaves, structure = tree_flatten(value)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaves[place] = change(leaf)
            break
    return tree_unflatten(leaves, structure)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def prove(root: nn.Module, plan: TensorPlan, calls: Mapping[str, Call], mesh: DeviceMesh) -> None:
    """Compare each kind of block under the plan with the plain one, on all ranks of the mesh.

    `calls`: the arguments with which each block is called, for their shapes.

    Raises:
        UserError: where they differ, or the block does not run with the plan.
    """
    shown: set[tuple[Any, ...]] = set()
    for name, call in calls.items():
        block = root.get_submodule(name)
        shapes = tuple((n, p.shape) for n, p in block.named_parameters())
        kind = (type(block), shapes)
        if kind in shown:
            continue
        shown.add(kind)
        why = ""
        try:
            difference = _difference(block, plan, call, mesh, f"{name}." if name else "")
        except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
            difference, why = math.inf, f": {str(error).splitlines()[0]}" if str(error) else ""
        worst = torch.tensor([difference], dtype=torch.float64, device=mesh.device_type)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=mesh.get_group())
        if not float(worst) <= 1:
            gave = why or f" (they differ by {float(worst):.0e} times what rounding may do)"
            raise UserError(
                f"tp={mesh.size()}: {type(block).__name__} gives other numbers with the plan that "
                f"is {plan.source}{gave}; give another one in [parallel.tp_plan], or leave tp at 1"
            )


def _difference(
    block: nn.Module, plan: TensorPlan, call: Call, mesh: DeviceMesh, prefix: str
) -> float:
    device = torch.device(mesh.device_type)
    plain = copy.deepcopy(block).to_empty(device=device).double()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*plain.parameters(), *plain.buffers()):
        with torch.no_grad():
            tensor.copy_(_drawn(tensor, generator) / (2 if tensor.is_floating_point() else 1))
    split = copy.deepcopy(plain)
    leaves, structure = tree_flatten(call)
    drawn = [
        _drawn(one, generator).to(device) if isinstance(one, torch.Tensor) else one
        for one in leaves
    ]
    apply_plan(split, plan, [""], mesh, prefix)
    precisions = _Precisions()  # type: ignore[no-untyped-call]
    with precisions:
        expected = _run(plain, drawn, structure)
    found = _run(split, drawn, structure)
    if plan.splits_sequence:
        _refuse_uncovered(split)
    limit = PROVEN_SINGLE if precisions.has_low else PROVEN
    differences = [relative_difference(*pair) for pair in zip(found, expected, strict=True)]
    return max(differences, default=math.inf) / limit


class _Precisions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether anything below double precision is computed."""

    has_low = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.has_low |= result.dtype != torch.float64
        return result


def _run(block: nn.Module, leaves: Sequence[Any], structure: Any) -> list[Any]:
    """Return a block's outputs, and the gradients of its inputs and parameters."""
    own = [
        leaf.clone().requires_grad_()
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        else leaf
        for leaf in leaves
    ]
    args, kwargs = tree_unflatten(own, structure)
    with eval_mode(block):
        outputs = [
            leaf
            for leaf in tree_flatten(block(*args, **kwargs))[0]
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        ]
    # Another weight for each number: a plain sum would hide that two were exchanged.
    weights = [torch.linspace(0.5, 1.5, one.numel()).to(one).view(one.shape) for one in outputs]
    torch.autograd.backward(outputs, weights)
    inputs = [leaf.grad for leaf in own if isinstance(leaf, torch.Tensor)]
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    return [*outputs, *inputs, *(gradients[name] for name in sorted(gradients))]


def _refuse_uncovered(block: nn.Module) -> None:
    """Refuse parameters that see a part of the sequence and whose gradients are not summed."""
    for name, parameter in block.named_parameters():
        if not isinstance(parameter, DTensor):
            raise ValueError(f"sequence_parallel reaches {name}, which no style covers")


def _drawn(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not like.is_floating_point():
        return torch.ones(like.shape, dtype=like.dtype)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)


def relative_difference(found: Any, expected: Any) -> float:
    """Return the largest difference of two tensors relative to the largest number expected."""
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    one, other = whole_of(found.detach()).double(), whole_of(expected.detach()).double()
    if one.shape != other.shape or not torch.isfinite(one).all():
        return math.inf
    scale = float(other.abs().max()) if other.numel() else 0.0
    return float((one - other).abs().max()) / max(scale, 1e-30) if one.numel() else 0.0


def check_ties(ties: Sequence[Sequence[str]], styles: Mapping[str, str]) -> None:
    """Refuse a plan that splits one of two modules that share a parameter.

    Raises:
        UserError: with their names.
    """
    for names in ties:
        split = [name for name in names if name.rpartition(".")[0] in styles]
        if split:
            other = next(name for name in names if name != split[0])
            raise UserError(
                f"tp_plan splits {split[0]}, which is also {other}: what is tied has to stay whole"
            )
