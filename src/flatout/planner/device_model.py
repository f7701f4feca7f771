"""What a plan is on: the device, what it takes alongside tensors, and how far to trust a trace."""

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.analysis.stream_changes import REACHED_HALF, reached_flops
from flatout.hardware.catalogue import GpuModel
from flatout.planner.allocator_settings import DEFAULT, AllocatorSettings
from flatout.planner.workspaces import Calibration
from flatout.records.memory_stream import MemoryStream
from flatout.records.plan import Amount, NumberSource

MARGINS = {"real": 0.0, "cuda_fake": 0.01, "virtual_cuda": 0.01, "cpu_fake": 0.05}
"""Error of a trace that is allowed for until one was measured on the GPU: three times what was seen
on an H200; five times as much, chosen, where the host's operators stand in."""
RESERVE_ERRORS = (0.032, 0.066)
"""The same for reserved bytes, too small and too large: the largest of 24 cases on an H200. Where
cuDNN's workspaces are of many sizes, a percent of one of them decides which blocks are reused."""
PASSES = 3
"""Times that a tensor passes the memory: written once, read by what follows and by backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """A device to plan for."""

    gpu: GpuModel
    calibration: Calibration
    settings: AllocatorSettings = DEFAULT
    gpus: int = 1
    """Of each host."""
    hosts: int = 1

    @property
    def ranks(self) -> int:
        """Processes of the training, one for each GPU."""
        return self.gpus * self.hosts

    @property
    def outside(self) -> Amount:
        """What is outside the allocator: the context and, with several ranks, NCCL."""
        parts = [self.calibration.context]
        parts += [self.calibration.nccl] if self.ranks > 1 else []
        return added(parts)

    def margin(self, stream: MemoryStream) -> float:
        """Return the relative error that a trace of this kind may have."""
        if self.calibration.trace_error is not None and stream.method != "cpu_fake":
            return abs(self.calibration.trace_error)
        return MARGINS.get(stream.method, MARGINS["cpu_fake"])

    def reserve_margins(self, stream: MemoryStream) -> tuple[float, float]:
        """Return the shares by which reserved bytes may be predicted too small and too large."""
        margin = self.margin(stream)
        if stream.method == "real":
            return margin, margin
        small, large = self.calibration.reserve_errors or RESERVE_ERRORS
        return max(small, margin), max(large, margin)

    def limit(self, stream: MemoryStream) -> int:
        """Return what the allocator may take at most, so that it fits even if all errs upwards."""
        room = self.gpu.memory_bytes - (self.outside.high or self.outside.bytes)
        return max(0, int(room / (1 + self.reserve_margins(stream)[0])))

    def step_s(self, stream: MemoryStream) -> float:
        """Return about how long a step takes: its arithmetic, and its tensors' way to memory."""
        last = stream.steps - 1
        made = sum(a.size for a in stream.allocations if a.step == last)
        return stream.model_flops / self.flops_per_s(stream) + self.traffic_s(made)

    def flops_per_s(self, stream: MemoryStream) -> float:
        """Return the arithmetic that is reached in the precision of the step."""
        return reached_flops(self.gpu, stream)

    @property
    def half_flops_per_s(self) -> float:
        """What is reached in half precision."""
        return REACHED_HALF * self.gpu.bf16_flops

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability, where the device has one."""
        return self.gpu.compute_capability

    @property
    def host_bandwidth(self) -> float:
        """Bytes a second between the host's memory and the device's."""
        return self.gpu.host_bandwidth

    @property
    def has_expandable_segments(self) -> bool:
        """Whether the allocator is set to grow segments already."""
        return self.settings.expandable_segments

    def traffic_s(self, count: int) -> float:
        """Return how long it takes to write and read these bytes."""
        return PASSES * count / self.gpu.bandwidth


def added(amounts: Sequence[Amount]) -> Amount:
    """Return several amounts as one, as sure as the least sure of them."""
    order = list(NumberSource)
    return Amount(
        bytes=sum(one.bytes for one in amounts),
        source=max((one.source for one in amounts), key=order.index),
        low=sum(one.bytes if one.low is None else one.low for one in amounts),
        high=sum(one.bytes if one.high is None else one.high for one in amounts),
    )
