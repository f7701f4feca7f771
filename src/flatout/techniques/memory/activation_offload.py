"""Keep activations in host memory between forward and backward.

What it does: copies large tensors that backward will need to pinned host memory while the model
runs, and back when backward asks for them. Parameters stay where they are.
When it helps: activations fill the device, and recomputing them costs more than two copies.
What it costs: two copies over the bus for each byte, and as much host memory.
How it is checked: losses and gradients are bit-identical.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.analysis.stream_changes import checkpointed, recomputed, regions_of
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.memory_stream import MemoryStream
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    MemoryOption,
    Numerics,
    PlannedDevice,
    Rescue,
    Technique,
)
from flatout.techniques.memory_pressure import activation_bytes, is_tight

if TYPE_CHECKING:
    import torch

COPY_BYTES_PER_S = 20e9
"""Pinned memory over PCIe 4 x16: 32 GB/s by its specification, some 20-25 in practice; general
knowledge, used where the profile has no measured rate."""
OFFLOADED_SHARE = 0.8
"""Of the activations: those above the size. Assumed."""
MIB = 1024**2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOffload(Technique):
    """Keep large activations in pinned host memory."""

    addresses: ClassVar[frozenset[str]] = frozenset({"out_of_memory"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    rescues: ClassVar[tuple[Rescue, ...]] = (Rescue(cost=0.5, needs_device=True),)
    by_hand: ClassVar[str] = """
Around the forward pass; this moves small tensors and parameters too:
+ with torch.autograd.graph.save_on_cpu(pin_memory=True):
+     output = model(...)
"""

    min_mib: int = 1
    """Tensors below this many MiB stay on the device: a copy has a cost of its own."""

    def __post_init__(self) -> None:
        if self.min_mib < 0:
            raise ValueError(f"min_mib={self.min_mib} must not be negative")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ActivationOffload"]:
        """Return the technique on a device with memory of its own, where that is tight."""
        if profile.device_kind == "cpu" or not is_tight(profile, machine):
            return ()
        return [cls()] if activation_bytes(profile) < machine.memory_bytes / 2 else ()

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what it makes of a traced step."""
        return [
            MemoryOption(
                why="activations wait in the host's memory; the link is the limit",
                change=checkpointed,
                cost=offload_cost,
                helps=lambda stream, _: bool(regions_of(stream)),
                group="activations",
                is_traceable=False,  # copies free memory when they are over
            )
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect both copies to be waited for."""
        measured = profile.limits.copy_bytes_per_s if profile.limits else None
        moved = int(OFFLOADED_SHARE * activation_bytes(profile))
        rate = measured or COPY_BYTES_PER_S
        return Effect(
            step_ms=2e3 * moved / rate,
            peak_bytes=-moved,
            why=f"{moved / MIB:.0f} MiB to the host and back at {rate / 1e9:.0f} GB/s",
        )

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Run the call with the hooks that move what is saved."""
        parameters = list(root.parameters())
        if not parameters or all(p.device.type == "cpu" for p in parameters):
            raise NotApplicable("the model is on the CPU: its activations are in host memory")
        return offloaded(call, root, min_bytes=self.min_mib * MIB)


def offloaded(
    call: Callable[..., Any], module: "torch.nn.Module", *, min_bytes: int = MIB
) -> Callable[..., Any]:
    """Return the call with what it saves for backward kept on the host, layout and all."""
    import torch

    fixed = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    is_pinned = torch.cuda.is_available()

    def pack(tensor: "torch.Tensor") -> Any:
        size = tensor.numel() * tensor.element_size()
        if size < min_bytes or tensor.layout is not torch.strided:
            return tensor
        if tensor.untyped_storage().data_ptr() in fixed:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned)
        host.copy_(tensor)
        return tensor.device, host

    def unpack(packed: Any) -> "torch.Tensor":
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        back: torch.Tensor = host.to(device, non_blocking=is_pinned)
        return back

    @functools.wraps(call)
    def call_offloaded(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return call(*args, **kwargs)

    return call_offloaded


def offload_cost(stream: MemoryStream, device: PlannedDevice) -> float:
    """Return the ratio where copies hide behind the step as far as they are shorter than it."""
    moved = sum(allocation.size for allocation in recomputed(stream))
    step = device.step_s(stream)
    return max(1.0, moved / device.host_bandwidth * 2 / step) if step else 1.0


KOREAN = """
Keep large activations in pinned host memory.
    큰 활성값을 호스트의 고정된 메모리에 둡니다.
Around the forward pass; this moves small tensors and parameters too:
    순전파를 감쌉니다. 작은 텐서와 파라미터도 함께 옮겨집니다:
activations wait in the host's memory; the link is the limit
    활성값을 호스트 메모리에 두며, 연결 속도가 한계입니다
{mib} MiB to the host and back at {rate} GB/s
    {mib} MiB를 {rate} GB/s로 호스트에 보냈다가 다시 가져옵니다
the model is on the CPU: its activations are in host memory
    모델이 CPU에 있어 활성값이 이미 호스트 메모리에 있습니다
"""
