"""Find a mixture of experts that is computed in a loop, and compute it in groups instead.

`group` does not read the loop. A mixture with one router has few ways to be computed: each is tried
on the inputs of a real call, and taken where outputs and gradients are those of the loop.
`grouped_linear` is the product.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from flatout.kernels.module_proof import (
    TOLERANCE,
    NotProvenError,
    Result,
    difference,
    doubled,
    plain_computing,
    plain_facts,
    result_of,
    tensors_in,
)

ALIGNED = 8
"""Elements of 16 bytes in bf16: what the grouped kernel wants of both widths."""
MAX_PADDING = 2.0
"""Rows after padding over rows before it, from which on single products are less work."""


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    counts: Sequence[int],
    sizes: torch.Tensor,
) -> torch.Tensor:
    """Return `linear(rows of group i, weights[i], biases[i])` for all groups in one tensor.

    The rows of `x` are sorted by group, `counts` says how many each has; `sizes` is the same on
    the device of the rows, as sending the counts there would wait for a GPU.
    """
    if x.is_cuda:
        kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        if has_kernel(kind, weights[0]):
            return _by_kernel(x.to(kind), [w.to(kind) for w in weights], biases, counts, sizes)
        if len(counts) * max(counts) <= MAX_PADDING * x.shape[0]:
            return _padded(x, weights, biases, counts, sizes)
    parts = torch.split(x, list(counts))
    found = [
        functional.linear(part, weight, None if biases is None else biases[i])
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True))
    ]
    return torch.cat(found)


def has_kernel(kind: torch.dtype, weight: torch.Tensor) -> bool:
    """Return whether torch multiplies groups of these in one kernel."""
    fits = kind == torch.bfloat16 and all(size % ALIGNED == 0 for size in weight.shape)
    return fits and hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability() >= (8, 0)


def _by_kernel(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    _counts: Sequence[int],
    sizes: torch.Tensor,
) -> torch.Tensor:
    """Multiply by torch's grouped kernel; written for GPUs, where it has not run yet."""
    ends = sizes.cumsum(0, dtype=torch.int32)
    found: torch.Tensor = torch._grouped_mm(
        x, torch.stack(list(weights)).transpose(-2, -1), offs=ends
    )
    return _with_biases(found, biases, sizes)


def _padded(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    counts: Sequence[int],
    sizes: torch.Tensor,
) -> torch.Tensor:
    """Multiply all groups padded to the largest, in one batch of products."""
    rooms, width = max(counts), x.shape[-1]
    starts = sizes.cumsum(0) - sizes
    shifts = torch.arange(len(counts), device=x.device) * rooms - starts
    places = torch.arange(x.shape[0], device=x.device) + _by_row(shifts, sizes, x)
    roomy = x.new_zeros(len(counts) * rooms, width).index_copy(0, places, x)
    stacked = torch.stack(list(weights)).transpose(-2, -1)
    found = torch.bmm(roomy.view(len(counts), rooms, width), stacked)
    return _with_biases(found.flatten(0, 1).index_select(0, places), biases, sizes)


def _with_biases(
    rows: torch.Tensor, biases: Sequence[torch.Tensor] | None, sizes: torch.Tensor
) -> torch.Tensor:
    if biases is None:
        return rows
    return rows + _by_row(torch.stack(list(biases)), sizes, rows).to(rows.dtype)


def _by_row(values: torch.Tensor, sizes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the value of each group once for each of its rows; their number is known here."""
    return values.repeat_interleave(sizes, dim=0, output_size=rows.shape[0])


FEW_TOKENS = 64
"""Tokens on which all ways are tried, before the right one is proven on all."""
ACTIVATIONS = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus),
    *(nn.Hardswish, nn.Mish, nn.ReLU6, nn.Identity, nn.Dropout),
)
ROW_WISE = {
    *("relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "softplus", "dropout"),
    *("mul", "add", "sub", "truediv", "pow", "square", "chunk", "getitem", "float", "to", "mish"),
}
"""Operations on single rows: it does not matter which expert's they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """One way to choose experts and weigh what they give."""

    k: int
    order: str
    """`softmax first`, `choose first` or `sigmoid`."""
    shares_add_up: bool
    in_fp32: bool
    gives_logits: bool

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and numbers of each token's experts."""
        kind = torch.float32 if self.in_fp32 else logits.dtype
        if self.order == "choose first":
            values, chosen = logits.topk(self.k, dim=-1)
            return values.softmax(dim=-1, dtype=kind), chosen
        scores = logits.to(kind).sigmoid() if self.order == "sigmoid" else None
        scores = logits.softmax(dim=-1, dtype=kind) if scores is None else scores
        weights, chosen = scores.topk(self.k, dim=-1)
        if self.shares_add_up:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Where the parts of a mixture lie."""

    router: str
    experts: str
    graph: fx.Graph
    """What one expert computes."""


def mixtures(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules with a list of equal experts and a router over them, with their names."""
    return [(name, m) for name, m in root.named_modules() if _names(m) is not None]


def group(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Routing:
    """Replace a mixture's loop by grouped products; return the way it chooses.

    Raises:
        NotProvenError: with the reason, if no way is proven to be the loop's.
    """
    if "forward" in vars(module):
        raise NotProvenError("its forward was replaced already")
    original = module.forward
    bound = inspect.signature(original).bind(*args, **kwargs)
    values = list(bound.arguments.values())
    if len(values) != 1 or not isinstance(values[0], torch.Tensor):
        raise NotProvenError("it takes more than the tokens")
    ((name, tokens),) = bound.arguments.items()
    names = _names(module)
    if names is None:
        raise NotProvenError("it has no list of equal experts with one router over them")
    parts = Parts(router=names[0], experts=names[1], graph=_traced(module, names[1]))
    _check_alone(module, parts)
    facts, before = plain_facts(module), dict(vars(module))
    trials = [tokens, _skewed(tokens), _noisy(tokens)]
    expected = [result_of(module, original, {name: each}) for each in trials]
    if any(before.get(k, NotProvenError) is not v for k, v in vars(module).items()):
        raise NotProvenError("its forward keeps something on the module")
    skips = any(g is None for g in expected[1].gradients.values())
    way = _find_way(module, parts, original, tokens)
    rewritten = _forward(parts, way, skips=skips)
    for each, known in zip(trials, expected, strict=True):
        found = result_of(module, types.MethodType(rewritten, module), {name: each})
        off = difference(known, found)
        if not off <= TOLERANCE:
            raise NotProvenError(f"outputs or gradients differ by {off:.1g} on its inputs")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        is_known = len(given) == 1 and isinstance(given[0], torch.Tensor)
        run = is_known and self.training and facts.hold(self)
        return rewritten(self, *given) if run else type(self).forward(self, *args, **kwargs)

    module.forward = types.MethodType(forward, module)
    return way


def _names(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of the router and of the list of experts."""
    lists = [
        (name, child)
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) > 1 and _are_equal(child)
    ]
    if len(lists) != 1:
        return None
    ((name, experts),) = lists
    routers = [
        child_name
        for child_name, child in module.named_children()
        if isinstance(child, nn.Linear) and child.out_features == len(experts)
    ]
    return (routers[0], name) if len(routers) == 1 else None


def _are_equal(experts: nn.ModuleList) -> bool:
    signs = {
        (type(one), tuple((n, tuple(p.shape)) for n, p in one.named_parameters()))
        for one in experts
    }
    return len(signs) == 1


def _check_alone(module: nn.Module, parts: Parts) -> None:
    """Make sure that nothing else depends on the loop's calls."""
    if any(True for _ in module.buffers(recurse=False)):
        raise NotProvenError("it keeps a buffer, which its loop may change")
    for name, inner in getattr(module, parts.experts).named_modules():
        if inner._forward_hooks or inner._forward_pre_hooks or "forward" in vars(inner):
            raise NotProvenError(f"something listens to expert {name}")


def _skewed(tokens: torch.Tensor) -> torch.Tensor:
    """Return the first token everywhere: all go to the same experts, the others get none."""
    first = tokens.detach().reshape(-1, tokens.shape[-1])[:1]
    return first.expand(tokens.numel() // tokens.shape[-1], -1).reshape(tokens.shape).contiguous()


def _noisy(tokens: torch.Tensor) -> torch.Tensor:
    """Return other tokens of the same scale, which choose other experts."""
    numbers = torch.linspace(0, 997, tokens.numel(), dtype=torch.float64, device=tokens.device)
    spread = tokens.detach().double().std().clamp(min=1e-6)
    return ((numbers.square().sin() * 2 * spread).view(tokens.shape)).to(tokens.dtype)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _traced(module: nn.Module, experts: str) -> fx.Graph:
    """Return what an expert computes, made sure that its rows do not depend on one another."""
    expert: Any = getattr(module, experts)[0]
    if type(expert) is nn.Linear:
        graph = fx.Graph()
        graph.output(graph.call_module("", (graph.placeholder("x"),)))  # the layer itself
        return graph
    try:
        graph = _Tracer().trace(expert)
    except Exception as error:  # noqa: BLE001  whatever a script's code does to stand-ins
        raise NotProvenError(f"an expert depends on values: {error}"[:200]) from None
    _check_row_wise(expert, graph)
    return graph


def _check_row_wise(expert: nn.Module, graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_module":
            child = expert.get_submodule(str(node.target))
            if type(child) is not nn.Linear and not isinstance(child, ACTIVATIONS):
                raise NotProvenError(f"an expert holds a {type(child).__name__}")
        elif node.op in ("call_function", "call_method"):
            called = str(getattr(node.target, "__name__", node.target))
            if called.rstrip("_") not in ROW_WISE:
                raise NotProvenError(f"an expert calls {called}()")
        elif node.op == "get_attr":
            raise NotProvenError(f"an expert has a parameter {node.target} of its own")


def _find_way(
    module: nn.Module, parts: Parts, original: Callable[..., Any], tokens: torch.Tensor
) -> Routing:
    few = (tokens[:1] if tokens.dim() > 2 else tokens)[..., :FEW_TOKENS, :]
    expected = _outputs(module, original, few)
    for way in _ways(module, parts, gives_logits=len(expected) > 1):
        found = _outputs(module, types.MethodType(_forward(parts, way, skips=True), module), few)
        one = Result(outputs=expected, gradients={})
        if difference(one, Result(outputs=found, gradients={})) <= TOLERANCE:
            return way
    raise NotProvenError("it chooses or weighs its experts in a way that is not known")


def _outputs(
    module: nn.Module, forward: Callable[..., Any], tokens: torch.Tensor
) -> list[torch.Tensor]:
    state = {n: doubled(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
    module.forward = forward
    try:
        with plain_computing(), torch.no_grad():
            output = torch.func.functional_call(module, state, (doubled(tokens),))
    finally:
        del module.forward
    return tensors_in(output)


def _ways(module: nn.Module, parts: Parts, *, gives_logits: bool) -> Iterator[Routing]:
    """Yield the ways to choose, those with the script's own numbers first."""
    count = len(getattr(module, parts.experts))
    own = [v for v in vars(module).values() if type(v) is int and 1 <= v <= count]
    for k in dict.fromkeys((*own, 2, 1, count)):
        for order in ("softmax first", "choose first", "sigmoid"):
            for shares_add_up in (True, False)[order == "choose first" :]:
                for in_fp32 in (False, True):
                    yield Routing(
                        k=k,
                        order=order,
                        shares_add_up=shares_add_up,
                        in_fp32=in_fp32,
                        gives_logits=gives_logits,
                    )


def _forward(parts: Parts, way: Routing, *, skips: bool) -> Callable[..., Any]:
    """Return the mixture's forward in groups.

    `skips`: whether experts without tokens get no gradient; else they get zeros.
    """

    def forward(self: nn.Module, tokens: torch.Tensor) -> Any:
        rows = tokens.reshape(-1, tokens.shape[-1])
        logits = getattr(self, parts.router)(rows)
        weights, chosen = way.choose(logits)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        experts: Any = getattr(self, parts.experts)
        sizes = torch.bincount(flat, minlength=len(experts))
        counts: list[int] = sizes.tolist()
        used = [i for i, count in enumerate(counts) if count or not skips]
        if len(used) < len(counts):
            # The used ones first, found where the numbers lie: a list of them would travel there.
            sizes = sizes.index_select(0, (sizes == 0).int().argsort(stable=True)[: len(used)])
        given = _Groups([experts[i] for i in used], parts.graph, [counts[i] for i in used], sizes)
        made = given.run(rows.index_select(0, order // way.k))
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        apart = made.index_select(0, places).view(len(rows), way.k, -1)
        output = (apart * weights.to(apart.dtype).unsqueeze(-1)).sum(dim=1)
        output = output.to(tokens.dtype).view(*tokens.shape[:-1], -1)
        return (output, logits) if way.gives_logits else output

    return forward


class _Groups(fx.Interpreter):
    """Runs an expert's graph on the rows of all experts."""

    def __init__(
        self,
        experts: Sequence[nn.Module],
        graph: fx.Graph,
        counts: Sequence[int],
        sizes: torch.Tensor,
    ) -> None:
        super().__init__(experts[0], garbage_collect_values=False, graph=graph)
        self.experts = experts
        self.counts = counts
        self.sizes = sizes
        """The same as the counts, where the rows are."""

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiply by groups where a linear layer is called; all else goes row by row."""
        layers: list[Any] = [expert.get_submodule(target) for expert in self.experts]
        if not isinstance(layers[0], nn.Linear):
            return layers[0](*args, **kwargs)
        biases = None if layers[0].bias is None else [layer.bias for layer in layers]
        weights = [layer.weight for layer in layers]
        return grouped_linear(args[0], weights, biases, self.counts, self.sizes)
