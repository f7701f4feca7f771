"""What a compiled step keeps for backward: read off the graphs that AOTAutograd partitions."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from flatout.planner.tracing.training_step import TrainingStep
from flatout.records.memory_stream import Component, MemoryStream
from flatout.records.units import format_bytes

GraphCall = Callable[[FakeTensorMode], int]
"""One call of a compiled module, to be repeated: returns the bytes that it keeps for backward."""


def call_of(module: nn.Module, args: Any, kwargs: Any, device: str) -> GraphCall:
    """Return a call under the autocast that is on; of its tensors only the layout is kept."""
    is_on = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_on else None
    autocast = functools.partial(torch.autocast, device, dtype=dtype, enabled=is_on)
    return functools.partial(_kept_of, module, tree_map(_described, (args, kwargs)), autocast)


def bounded_step(
    stream: MemoryStream, model: nn.Module, subject: TrainingStep, fake: FakeTensorMode
) -> MemoryStream:
    """Return the stream of an eager step with what it would keep if all of it were compiled."""
    assert stream.batch is not None
    with fake:
        batch = subject.batch(stream.batch, torch.device(stream.device))
    call = call_of(_Step(model, subject), (batch,), {}, stream.device)
    return bounded(stream, [call], fake, is_in_module=False)


def bounded(
    stream: MemoryStream,
    calls: Sequence[GraphCall],
    fake: FakeTensorMode,
    *,
    is_in_module: bool = True,
) -> MemoryStream:
    """Return the stream of eager code with what its compiled parts would keep for backward."""
    try:
        kept = sum(call(fake) for call in calls)
    except Exception as error:  # noqa: BLE001  whatever keeps a call from being one graph
        said = " ".join(str(error).split())[:200]
        note = f"its graphs could not be partitioned ({type(error).__name__}: {said})"
        return replace(stream, notes=(*stream.notes, note))
    eager = kept_at_once(stream, is_in_module=is_in_module)
    note = (
        f"for backward the compiled step keeps {format_bytes(kept)} by its graphs' partition, "
        f"the eager one {format_bytes(eager)}: expect what lies between"
    )
    notes = (*stream.notes, note)
    return replace(stream, compiled_kept_bytes=kept, eager_kept_bytes=eager, notes=notes)


def kept_at_once(stream: MemoryStream, *, is_in_module: bool) -> int:
    """Return the most bytes of activations that are alive in the last step at any time."""
    last, now, most = stream.steps - 1, 0, 0
    for index, born in stream.events:
        each = stream.allocations[index]
        is_kept = each.component is Component.ACTIVATIONS and each.step == last
        if is_kept and (each.module or not is_in_module):
            now += each.size if born else -each.size
            most = max(most, now)
    return most


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def made(self) -> Tensor:
        """Return a tensor like it."""
        shape, dtype, device, needs = self
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=needs)


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _Layout(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)


class _Step(nn.Module):
    """A model with its loss, as one function of the batch."""

    def __init__(self, model: nn.Module, subject: TrainingStep) -> None:
        super().__init__()
        self.model, self.subject = _uncompiled(model), subject

    def forward(self, batch: Any) -> Tensor:
        name = self.subject.autocast
        dtype = None if name is None else getattr(torch, name)
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            return self.subject.loss(self.model, batch)


def _kept_of(
    module: nn.Module, given: Any, autocast: Callable[[], Any], fake: FakeTensorMode
) -> int:
    """Return the bytes that one compiled call keeps, its results among them.

    Raises:
        Exception: whatever keeps this call from being compiled as one graph.
    """
    with _disable_current_modes(), fake:
        args, kwargs = tree_map(
            lambda leaf: leaf.made() if isinstance(leaf, _Layout) else leaf,
            given,
            is_leaf=lambda leaf: isinstance(leaf, _Layout),
        )
        with autocast():
            return _kept(_uncompiled(module), args, kwargs)


def _kept(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Partition one call as inductor does, by the smallest cut; of a storage once counted."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    kept: list[int] = []

    def forward_graph(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        kept.append(_saved_bytes(gm))
        return make_boxed_func(gm.forward)

    def backward_graph(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return make_boxed_func(gm.forward)

    def run(values: Any, args: Any, kwargs: Any) -> Any:
        found = torch.func.functional_call(module, values, args, kwargs)
        return [each for each in tree_leaves(found) if isinstance(each, Tensor)]

    compiled = aot_function(
        run,
        fw_compiler=forward_graph,
        bw_compiler=backward_graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    results = compiled(values, args, kwargs)
    torch.autograd.backward([each.sum() for each in results if each.requires_grad])
    return sum(kept)


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the model without the wrapping of `torch.compile`."""
    model = getattr(model, "_orig_mod", model)
    for module in model.modules():
        module._compiled_call_impl = None
    return model


def _saved_bytes(graph: torch.fx.GraphModule) -> int:
    """Return the bytes of a forward graph's outputs that are neither its inputs nor their views."""
    results = next(iter(graph.graph.find_nodes(op="output"))).args[0]
    given = {_storage(node) for node in graph.graph.find_nodes(op="placeholder")}
    saved: dict[int, int] = {}
    for node in results if isinstance(results, tuple | list) else ():
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if isinstance(value, Tensor) and _storage(node) not in given:
            saved[_storage(node)] = value.untyped_storage().nbytes()
    return sum(saved.values())


def _storage(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else id(node)
