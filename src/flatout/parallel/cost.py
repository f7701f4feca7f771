"""Seconds of a training step that is spread over ranks, from a few constants. Pure.

A microbatch takes a stage as long as the host needs to start its operators and the device to run
them. The two overlap in part: neither the sum nor the larger one is right, the root of the sum of
squares is between them. A pipeline waits for its slowest stage in every microbatch but the first,
which fills it. What ranks exchange costs a latency for each hop and its bytes over a bandwidth.

The constants come from a data sheet, or from a measured profile (`flatout.parallel.search`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flatout.records.plan import NumberSource

REDUCED_AND_GATHERED = 2
"""An all-reduce is a reduce-scatter followed by an all-gather, as rings do it."""
OFFLOAD_TRAVELS = 3
"""Times that the size of offloaded parameters crosses the link to the host in a step: parameters
for forward and for backward, and gradients. FSDP overlaps a part of it, which is not counted."""
HOST_PASSES = 7
"""Times that Adam's step touches the parameters' size: it reads four tensors and writes three."""
HOST_BYTES_PER_S = 50e9
"""What a host's memory gives the steps of all its ranks together: assumed."""


def offload_s(parameter_bytes: float, link_bytes_per_s: float, ranks: int = 1) -> float:
    """Return what a step takes longer with parameters and the optimizer's step on the host.

    The bytes are those of one rank's share; so many ranks step on the same host.

    >>> round(offload_s(4e9, 50e9), 2), round(offload_s(1e9, 50e9, ranks=4), 2)
    (0.8, 0.62)
    """
    per_byte = OFFLOAD_TRAVELS / link_bytes_per_s + ranks * HOST_PASSES / HOST_BYTES_PER_S
    return parameter_bytes * per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What ranks exchange over, as one of them sees it."""

    latency_s: float
    """Of one hop."""
    bytes_per_s: float
    """In one direction, when all ranks send at once."""
    source: NumberSource
    overlap: float = 0.0
    """Share of the exchange that goes on while the rank computes."""
    measured: Mapping[int, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """By ranks: bytes and seconds of measured all-reduces, the smallest first."""

    def all_gather_s(self, size: float, ranks: int) -> float:
        """Return how long it takes to give every rank all of `size` bytes.

        Each has a part at first. A reduce-scatter takes as long.
        """
        if ranks == 1 or size == 0:
            return 0.0
        return (ranks - 1) * self.latency_s + (ranks - 1) / ranks * size / self.bytes_per_s

    def all_reduce_s(self, size: float, ranks: int) -> float:
        """Return how long it takes to add up `size` bytes over the ranks."""
        if ranks == 1 or size == 0:
            return 0.0
        curve = self.measured.get(ranks)
        if curve is None:
            return REDUCED_AND_GATHERED * self.all_gather_s(size, ranks)
        return _between(curve, size)

    def send_s(self, size: float) -> float:
        """Return how long one message takes."""
        return self.latency_s + size / self.bytes_per_s


def _between(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Return the seconds at a size: straight between measured ones, by bandwidth beyond them."""
    sizes, seconds = zip(*curve, strict=True)
    if size > sizes[-1]:
        return float(seconds[-1] * size / sizes[-1])
    return float(np.interp(size, sizes, seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one rank does for one microbatch of one stage, forward and backward."""

    flops: float
    moved_bytes: float = 0.0
    """Reads and writes that no matrix product hides: attention scores, norms, activations."""
    starts: float = 0.0
    """Operators that the host starts, in the unit of the calibration."""
    exchange_s: float = 0.0
    """Collectives inside the microbatch, which the next operator waits for: tensor parallel."""
    hop_s: float = 0.0
    """Activations and their gradients to the next stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step of one plan."""

    stages: tuple[Work, ...]
    """One for each rank of the pipeline, in order; one alone without a pipeline."""
    microbatches: int = 1
    gradients_s: float = 0.0
    """Data parallel: what the ranks exchange of gradients and parameters in a step."""
    overlap: float = 0.0
    """Share of that which backward hides at most, as the link was measured or assumed."""
    parameters: float = 0.0
    """That the optimizer of one rank steps on, on the fullest stage."""
    host_s: float = 0.0
    """Of offloaded parameters and states: their way to the host and back, and the step there."""
    data_s: float = 0.0
    """Until the loaders of all ranks on one host have made the samples of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCosts:
    """What a device takes for each unit of work."""

    s_per_flop: float
    s_per_byte: float = 0.0
    s_per_start: float = 0.0
    s_per_parameter: float = 0.0
    """Of the optimizer's step."""
    step_s: float = 0.0
    """Of every step, whatever is in it."""
    source: NumberSource = NumberSource.ASSUMED

    def work_s(self, work: Work) -> float:
        """Return how long a microbatch takes a stage, without the hop to the next.

        >>> DeviceCosts(s_per_flop=3.0, s_per_start=4.0).work_s(Work(flops=1, starts=1))
        5.0
        """
        device = self.s_per_flop * work.flops + self.s_per_byte * work.moved_bytes
        return math.hypot(device + work.exchange_s, self.s_per_start * work.starts)


BACKWARD_SHARE = 2 / 3
"""Of a microbatch: backward has two matrix products for one of forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Where the seconds of a step go. The parts add up to `total_s`, but for waits for data."""

    compute_s: float
    """Of the slowest stage, operators' starts included."""
    tensor_s: float
    """Part of `compute_s` in which the ranks of a tensor-parallel group exchange."""
    bubble_s: float
    """In which a stage waits for the pipeline to fill and to drain."""
    hop_s: float
    exposed_s: float
    """Exchange of gradients and parameters that backward does not hide."""
    optimizer_s: float
    rest_s: float
    data_s: float
    """What the loaders take for a step; it counts where it is longer than everything else."""
    start_s: float
    """Part of `compute_s` that is left if the device were infinitely fast."""

    @property
    def busy_s(self) -> float:
        """The step as if batches were there."""
        parts = self.compute_s, self.bubble_s, self.hop_s, self.exposed_s
        return sum(parts) + self.optimizer_s + self.rest_s

    @property
    def total_s(self) -> float:
        """The step."""
        return max(self.busy_s, self.data_s)

    @property
    def shares(self) -> Mapping[str, float]:
        """Parts of the step that more ranks do not make shorter, by their cause."""
        found = {
            "communication": self.exposed_s + self.tensor_s + self.hop_s,
            "bubble": self.bubble_s,
            "data": max(0.0, self.data_s - self.busy_s),
            "starts": self.start_s,
        }
        return {cause: seconds / self.total_s for cause, seconds in found.items()}


def step_cost(step: StepWork, costs: DeviceCosts) -> StepCost:
    """Return where the seconds of a step go.

    >>> work = Work(flops=2.0)
    >>> step_cost(StepWork(stages=(work, work), microbatches=3), DeviceCosts(s_per_flop=1)).total_s
    8.0
    """
    each_s = [costs.work_s(work) for work in step.stages]
    slowest = max(range(len(each_s)), key=each_s.__getitem__)
    work, most_s = step.stages[slowest], each_s[slowest]
    passes = step.microbatches + len(each_s) - 1
    compute_s = step.microbatches * most_s
    hidden_s = step.overlap * BACKWARD_SHARE * compute_s / step.microbatches
    free_s = costs.work_s(replace(work, exchange_s=0.0))
    return StepCost(
        compute_s=compute_s,
        tensor_s=step.microbatches * (most_s - free_s),
        bubble_s=sum(each_s) - most_s,
        hop_s=passes * max(work.hop_s for work in step.stages),
        exposed_s=max(0.0, step.gradients_s - min(hidden_s, step.overlap * step.gradients_s)),
        optimizer_s=costs.s_per_parameter * step.parameters,
        rest_s=costs.step_s + step.host_s,
        data_s=step.data_s,
        start_s=step.microbatches * costs.s_per_start * work.starts,
    )
