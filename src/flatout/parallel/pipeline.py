"""Pipeline parallelism of a Task's model: traced, cut into stages of equal cost, and scheduled.

The model's own forward is traced down to its blocks, which stay what they are. It is cut where the
fewest tensors pass, so that the longest stage is as short as it can be, and among such cuts the one
whose largest stage holds least. The schedules are torch's.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from flatout.kernels.computed_trace import ComputedTrace
from flatout.parallel.engines import whole_of
from flatout.parallel.task_model import Place
from flatout.records.errors import UserError
from flatout.records.parallel import SCHEDULES

MAX_PASSED = 4
"""Tensors that may pass from one stage to the next."""
SLACK = 0.05
"""Share by which a stage may be longer than needed, for a smaller largest stage."""


FACTORIES = frozenset(
    {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
)
"""Functions of torch that make tensors of numbers: they are run again in each step."""
SHAPES = frozenset({"device", "dim", "dtype", "layout", "ndim", "numel", "requires_grad", "shape"})
"""What is known of a tensor while it is traced, and `size`."""


class _KnownShape(fx.Proxy):
    """A traced tensor whose shape is known: asking for it gives numbers, not more nodes."""

    tracer: "_Tracer"

    def __getattr__(self, k: str) -> Any:
        if k in SHAPES or k == "size":
            return getattr(self.tracer.values[self.node], k)
        return super().__getattr__(k)

    def __len__(self) -> int:
        return len(self.tracer.values[self.node])


class _Tracer(ComputedTrace):
    """Traces what is around the blocks, on shapes, and notes what each node costs.

    A forward may ask for shapes and branch on them: those of a microbatch do not change.
    """

    def __init__(self, blocks: Sequence[str], inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self.blocks, self.inputs = blocks, inputs
        self.flops: Counter[fx.Node] = Counter()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        start = f"{module_qualified_name}."
        return not any(one.startswith(start) for one in self.blocks)

    def proxy(self, node: fx.Node) -> _KnownShape:
        return _KnownShape(node, self)

    def given(self, node: fx.Node) -> Any:
        default = node.args[0] if node.args else None
        return self.inputs.get(str(node.target).lstrip("*"), default)

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            proxy = super().create_proxy(*args, **kwargs)
        self.flops[proxy.node] = counter.get_total_flops()
        value = self.values[proxy.node]
        is_tensors = any(isinstance(one, torch.Tensor) for one in tree_leaves(value))
        return proxy if is_tensors or value is None else value


class _Factories(TorchFunctionMode):
    """Makes nodes of tensors that are made of nothing but numbers."""

    def __init__(self, tracer: _Tracer, device: torch.device) -> None:
        super().__init__()
        self.tracer, self.device = tracer, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in FACTORIES:
            return func(*args, **named)
        if self.tracer.is_computing:
            return func(*args, **{"device": self.device} | named)
        return self.tracer.create_proxy(
            "call_function", func, args, {"device": self.device} | named
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Nodes of the traced model that stay together, and what they cost."""

    nodes: tuple[fx.Node, ...]
    flops: int
    bytes: int
    """Of parameters with their gradients and two optimizer states, and of what is kept for
    backward."""


def split_model(
    root: nn.Module,
    blocks: Sequence[str],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    place: Place,
) -> list[nn.Module]:
    """Return the stages of a model, in order; their modules are the model's.

    Without names of blocks its children are the blocks. `call` has the arguments of a microbatch
    on the root's device; the stages run on this rank's.

    Raises:
        UserError: where it cannot be traced, or has too few blocks.
    """
    norm = next((m for m in root.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)), None)
    if norm is not None:
        raise UserError(
            f"pp: {type(norm).__name__} would take its statistics from microbatches, which is "
            "another training: use GroupNorm, or leave pp at 1"
        )
    names = list(blocks) or [name for name, _ in root.named_children()]
    args, kwargs = call
    given = dict(zip(signature(root.forward).parameters, args, strict=False)) | kwargs
    costs = _Tracer(names, given)
    try:
        with _Factories(costs, next(root.parameters()).device):
            graph = costs.trace(root)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  tracing runs any code of the model's
        kind, said = type(error).__name__, (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"pp: {type(root).__name__} cannot be split ({kind}: {said}); its forward has to call "
            "its blocks one after the other, whatever the values: leave pp at 1"
        ) from None
    stages = place.spec.stages
    units = _units(root, graph, costs, {*names})
    if len(units) < stages:
        raise UserError(
            f"pp: {type(root).__name__} can be cut into {len(units)} pieces and {stages} stages "
            "were asked for: give fewer"
        )
    ends = balanced([one.flops for one in units], [one.bytes for one in units], stages)
    found: list[nn.Module] = []
    for start, end in pairwise([0, *ends]):
        nodes = [node for unit in units[start:end] for node in unit.nodes]
        found.append(_stage(root, graph, nodes, costs, place.device))
    return found


def _units(root: nn.Module, graph: fx.Graph, costs: _Tracer, blocks: set[str]) -> list[Unit]:
    """Return the pieces between which the model may be cut: after a block, where little passes."""
    body = _body(graph)
    groups: list[list[fx.Node]] = [[]]
    for place, node in enumerate(body):
        groups[-1].append(node)
        is_end = node.op == "call_module" and node.target in blocks and node is not body[-1]
        if is_end and 0 < len(_passed(body, place, costs)) <= MAX_PASSED:
            groups.append([])
    if len(groups) > 1 and not any(node.op == "call_module" for node in groups[-1]):
        last = groups.pop()
        groups[-1] += last
    return [_unit(root, nodes, costs) for nodes in groups]


def _unit(root: nn.Module, nodes: Sequence[fx.Node], costs: _Tracer) -> Unit:
    held = {
        id(p): p.numel() * p.element_size()
        for one in nodes
        if one.op == "call_module"
        for p in root.get_submodule(str(one.target)).parameters()
    }
    values = (costs.values[one] for one in nodes)
    kept = sum(x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor))
    return Unit(
        nodes=tuple(nodes),
        flops=sum(costs.flops[one] for one in nodes),
        bytes=4 * sum(held.values()) + kept,
    )


def _passed(body: Sequence[fx.Node], place: int, costs: _Tracer) -> list[fx.Node]:
    """Return the tensors made up to a node that later ones use."""
    after = {*body[place + 1 :]}
    return [
        node
        for node in body[: place + 1]
        if isinstance(costs.values[node], torch.Tensor)
        and any(user in after or user.op == "output" for user in node.users)
    ]


def balanced(costs: Sequence[float], sizes: Sequence[float], stages: int) -> list[int]:
    """Return where each stage ends: the longest as short as it can be, then the largest small.

    >>> balanced([1, 1, 1, 1, 4], [1, 1, 1, 1, 1], 2)
    [4, 5]
    >>> balanced([1, 1, 1, 1], [9, 1, 1, 1], 2)
    [2, 4]
    """
    total = sum(costs) or 1.0
    longest, _ = _smallest_worst(costs, costs, stages, limit=math.inf)
    limit = longest + SLACK * total / stages
    return _smallest_worst(sizes, costs, stages, limit=limit)[1]


def _smallest_worst(
    weights: Sequence[float], costs: Sequence[float], stages: int, *, limit: float
) -> tuple[float, list[int]]:
    """Return the smallest largest weight of stages within a limit of cost, and where they end."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(1, stages + 1):
        earlier, best = best, {}
        for end in range(stage, len(costs) + 1):
            found = [
                (max(worst, sum(weights[start:end])), [*ends, end])
                for start, (worst, ends) in earlier.items()
                if start < end and sum(costs[start:end]) <= limit
            ]
            if found:
                best[end] = min(found, key=itemgetter(0))
    return best[len(costs)]


def _stage(
    root: nn.Module,
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    costs: _Tracer,
    device: torch.device,
) -> fx.GraphModule:
    """Return the module that runs some nodes: what they need comes in, what others need goes on."""
    inside = {*nodes}
    order = [one for one in graph.nodes if one.op != "output"]
    (output,) = (one for one in graph.nodes if one.op == "output")
    body = _body(graph)
    is_first, is_last = nodes[0] is body[0], nodes[-1] is body[-1]
    first, last = order.index(nodes[0]), order.index(nodes[-1])
    after = {*order[last + 1 :], output}
    traced_on = next(root.parameters()).device
    made = fx.Graph()
    copies: dict[fx.Node, Any] = {}

    def is_passed(node: fx.Node, users: set[fx.Node]) -> bool:
        is_tensor = isinstance(costs.values.get(node), torch.Tensor)
        return is_tensor and any(user in users for user in node.users)

    entering = [one for one in order[:first] if is_passed(one, inside | after)]
    late = ", ".join(str(one.target) for one in entering if one.op == "placeholder")
    if is_first:
        entering = [one for one in order if one.op == "placeholder"]
    elif late:
        raise UserError(
            f"pp: a later part of {type(root).__name__} uses its input {late} again, which only "
            "the first stage has: let the first block pass it on, or leave pp at 1"
        )
    for number, node in enumerate(entering):
        copies[node] = made.placeholder(str(node.target) if is_first else f"passed_{number}")

    def copy_of(node: fx.Node) -> Any:
        # A number of an earlier stage is the same in each microbatch: their shapes are.
        return copies[node] if node in copies else costs.values[node]

    for node in nodes:
        copies[node] = made.node_copy(node, copy_of)
        copies[node].args, copies[node].kwargs = fx.node.map_aggregate(
            (copies[node].args, copies[node].kwargs),
            lambda one: device if isinstance(one, torch.device) and one == traced_on else one,
        )
    if is_last:
        made.output(fx.map_arg(output.args[0], copy_of))
    else:
        leaving = [one for one in [*entering, *nodes] if is_passed(one, after)]
        passed = [copies[one] for one in leaving]
        made.output(passed[0] if len(passed) == 1 else tuple(passed))
    return fx.GraphModule(root, made, class_name=f"Stage{type(root).__name__}")


def _body(graph: fx.Graph) -> list[fx.Node]:
    return [one for one in graph.nodes if one.op not in ("placeholder", "output")]


def stage_numbers(place: Place) -> list[int]:
    """Return which stages are this rank's."""
    spec, rank = place.spec, place.index("pp")
    schedule = SCHEDULES[spec.schedule]
    if schedule.is_v_shaped:
        return [rank, spec.stages - 1 - rank]
    return [rank + spec.pp * turn for turn in range(schedule.stages_per_rank)]


class PipelineStages:
    """This rank's stages, and the schedule that runs them with the others'."""

    def __init__(self, parts: Sequence[nn.Module], place: Place, microbatches: int) -> None:
        self.parts, self.place, self.microbatches = parts, place, microbatches
        self.numbers = stage_numbers(place)
        self.stages = [
            PipelineStage(
                part, number, place.spec.stages, place.device, group=place.mesh["pp"].get_group()
            )
            for part, number in zip(parts, self.numbers, strict=True)
        ]
        self.loss: Callable[[Any, list[int]], torch.Tensor] | None = None
        kind = getattr(schedules, SCHEDULES[place.spec.schedule].torch_name)
        is_multi = issubclass(kind, schedules.PipelineScheduleMulti)
        self.schedule = kind(
            self.stages if is_multi else self.stages[0],
            n_microbatches=microbatches,
            loss_fn=self._loss_of,
            scale_grads=False,
        )
        self.shapes: list[torch.Size] | None = None

    @property
    def has_first(self) -> bool:
        """Whether this rank's first stage is the first of all."""
        return 0 in self.numbers

    @property
    def has_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.place.spec.stages - 1 in self.numbers

    def _loss_of(self, output: Any, rows: torch.Tensor) -> torch.Tensor:
        assert self.loss is not None
        return self.loss(output, rows.tolist())

    def run(
        self,
        call: tuple[Sequence[torch.Tensor], Mapping[str, Any]],
        samples: int,
        loss: Callable[[Any, list[int]], torch.Tensor],
    ) -> torch.Tensor:
        """Run forward and backward of a batch; return the sum of the microbatches' losses.

        The samples are a multiple of the microbatches. `loss` is given an output and the rows of
        the batch that it is of.
        """
        self.loss = loss
        args, kwargs = call if self.has_first else ((), {})
        self._check_shapes([one.shape for one in call[0] if isinstance(one, torch.Tensor)])
        losses: list[torch.Tensor] = []
        target = torch.arange(samples) if self.has_last else None
        self.schedule.step(
            *args,
            **kwargs,
            target=target,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self.place.device)
        return torch.stack([whole_of(one).detach().double() for one in losses]).sum()

    def _check_shapes(self, shapes: list[torch.Size]) -> None:
        if self.shapes is not None and shapes != self.shapes:
            raise UserError(
                f"pp: batches have to keep their shapes, and {list(map(tuple, self.shapes))} "
                f"became {list(map(tuple, shapes))}: pad them alike, or leave pp at 1"
            )
        self.shapes = shapes
