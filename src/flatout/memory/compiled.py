"""What a compiled step keeps for backward: read off the graphs that AOTAutograd partitions."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatout.core.units import format_bytes
from flatout.memory.stream import Component, MemoryStream

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flatout.memory.subject import Subject


def bounded(stream: MemoryStream, subject: "Subject", fake: "FakeTensorMode") -> MemoryStream:
    """Return the stream of an eager step with what the compiled one would keep for backward."""
    assert stream.batch is not None
    last = stream.steps - 1
    eager = sum(
        each.size
        for each in stream.allocations
        if each.component is Component.ACTIVATIONS and each.step == last
    )
    try:
        kept = kept_when_compiled(subject, stream.batch, torch.device(stream.device), fake)
    except Exception as error:  # noqa: BLE001  whatever keeps a step from being one graph
        said = " ".join(str(error).split())[:200]
        note = f"its graphs could not be partitioned ({type(error).__name__}: {said})"
        return replace(stream, notes=(*stream.notes, note))
    note = (
        f"for backward the compiled step keeps {format_bytes(kept)} by its graphs' partition, "
        f"the eager one {format_bytes(eager)}: expect what lies between"
    )
    return replace(stream, compiled_kept_bytes=kept, notes=(*stream.notes, note))


class _Step(nn.Module):
    """A model with its loss, as one function of the batch."""

    def __init__(self, model: nn.Module, subject: "Subject") -> None:
        super().__init__()
        self.model, self.subject = model, subject

    def forward(self, batch: Any) -> Tensor:
        name = self.subject.autocast
        dtype = None if name is None else getattr(torch, name)
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            return self.subject.loss(self.model, batch)


def kept_when_compiled(
    subject: "Subject", count: int, device: torch.device, fake: "FakeTensorMode"
) -> int:
    """Return the bytes that go from the compiled forward to the compiled backward.

    Inductor's own partition is used, the smallest cut. Of what shares a storage one counts.

    Raises:
        Exception: whatever keeps this step from being compiled as one graph.
    """
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    kept: list[int] = []

    def forward_graph(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        del example_inputs
        kept.append(_saved_bytes(gm))
        return make_boxed_func(gm.forward)

    def backward_graph(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        del example_inputs
        return make_boxed_func(gm.forward)

    with fake:
        model = _uncompiled(subject.model()).to(device).train()
        step = _Step(model, subject)
        values = {**dict(step.named_parameters()), **dict(step.named_buffers())}
        batch = subject.batch(count, device)

        def run(values: Any, batch: Any) -> Any:
            return torch.func.functional_call(step, values, (batch,))

        compiled = aot_function(
            run,
            fw_compiler=forward_graph,
            bw_compiler=backward_graph,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        compiled(values, batch).backward()
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
