"""Put a plan together: from a traced stream to components, the peak moment and the ladder.

`formula` is the classic estimate M = P*D_param + B*A*D_act + O*D_opt, next to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

from flatout.analysis.stream_changes import accumulated
from flatout.planner.device_model import DeviceModel, added
from flatout.planner.largest_batch import accumulation, fits_steadily, largest_batch
from flatout.planner.memory_options import Setup, ladder, replay_as_it_is
from flatout.planner.replay import AllocatorReplay, alive_at, components_at, replay
from flatout.planner.workspaces import (
    MOST_CONVOLUTION_BYTES,
    has_convolution,
    with_convolution_bytes,
)
from flatout.records.memory import TensorAtPeak
from flatout.records.memory_stream import Component, Mark, MemoryStream, Phase
from flatout.records.plan import Accumulating, Amount, NumberSource, Plan

COUNTED = (Component.PARAMETERS, Component.ACTIVATIONS, Component.OPTIMIZER)
"""The three terms: parameters, activations of the batch, optimizer state."""


def formula(
    at_peak: Mapping[Component, int], largest: Mapping[Component, int]
) -> tuple[int, Mapping[str, int]]:
    """Return the estimate, and the bytes at the peak that none of its terms counts, by name.

    Args:
        at_peak: bytes alive at the peak.
        largest: largest bytes of each component at any time: the formula adds them up as if
            they met.
    """
    missed = {part.value: count for part, count in at_peak.items() if part not in COUNTED and count}
    estimate = sum(largest.get(part, 0) for part in COUNTED)
    return estimate, dict(sorted(missed.items(), key=lambda item: -item[1]))


MOST_TENSORS = 12
"""Tensors of the peak moment that a plan names."""
MOST_POINTS = 1200
"""Points of a curve: more than a page shows pixels."""
HANDLES = 2
"""Of cuBLAS: one of the thread that runs forward, one of autograd's."""
KINDS = {
    Component.PARAMETERS: "parameter",
    Component.BUFFERS: "buffer",
    Component.GRADIENTS: "gradient",
    Component.OPTIMIZER: "optimizer state",
    Component.WORKSPACE: "workspace",
}


def plan_of(target: str, setup: Setup, *, fit: bool = False) -> Plan:
    """Return the plan of a traced step."""
    ground, stream = setup.ground, setup.stream
    limit, whole = ground.limit(stream), replay_as_it_is(setup)
    allocated, reserved = _amounts(stream, whole, ground)
    at_peak = components_at(stream, whole.peak_at)
    estimate, missed = formula(at_peak, largest_by_component(stream))
    batches = None
    if fit and setup.at is not None:
        batches = largest_batch(setup.at, limit, ground.settings, own=stream.batch or 0)
    most = batches.without_retries if batches else None
    before = (mark for mark in stream.marks if mark.at <= whole.peak_at)
    moment = [Mark(0, Phase.SETUP, 0), *before][-1]
    course = stream.alive()
    positions = thinned(course, whole.peak_at)
    return Plan(
        target=target,
        device=ground.gpu.full_name,
        capacity_bytes=ground.gpu.memory_bytes,
        batch=stream.batch,
        allocated=allocated,
        reserved=reserved,
        used=added([reserved, ground.outside]),
        components=_components(at_peak, reserved, ground, stream),
        peak_phase=moment.phase.value,
        peak_step=moment.step,
        largest=tuple(_tensors(stream, whole.peak_at)),
        timeline=tuple((position, course[position]) for position in positions),
        parts=parts_at(stream, positions),
        phases=tuple((mark.at, mark.phase.value, mark.step) for mark in stream.marks),
        largest_batch=batches,
        ladder=ladder(replace(setup, largest=most)),
        formula_bytes=estimate,
        formula_missed=missed,
        retries=max(whole.retries_by_step[1:], default=0),
        accumulating=None if whole.fits else accumulating(setup, most),
        notes=stream.notes,
        environment={
            "gpu": ground.gpu.name,
            "gpus": ground.gpus,
            "hosts": ground.hosts,
            "method": stream.method,
        },
    )


def largest_by_component(stream: MemoryStream) -> dict[Component, int]:
    """Return the largest bytes of each component at any time."""
    most = dict.fromkeys(Component, 0)
    for part, now in _courses(stream):
        most[part] = max(most[part], now[part])
    return most


def _courses(stream: MemoryStream) -> Iterator[tuple[Component, dict[Component, int]]]:
    """Yield the component that each event changes, with the bytes of all of them after it."""
    now = dict.fromkeys(Component, 0)
    for index, born in stream.events:
        allocation = stream.allocations[index]
        now[allocation.component] += allocation.size if born else -allocation.size
        yield allocation.component, now


def thinned(course: Sequence[int], peak_at: int) -> list[int]:
    """Return positions for a plot: of every stretch the highest point, and the ends."""
    if not course:
        return []
    width = max(1, ceil(len(course) / MOST_POINTS))
    stretches = (
        range(start, min(start + width, len(course))) for start in range(0, len(course), width)
    )
    highest = {max(stretch, key=course.__getitem__) for stretch in stretches}
    return sorted(highest | {0, len(course) - 1, peak_at})


def parts_at(stream: MemoryStream, positions: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the bytes of each component right after these events."""
    wanted = set(positions)
    rows = [{**now} for at, (_, now) in enumerate(_courses(stream)) if at in wanted]
    return {
        part.value: tuple(row[part] for row in rows)
        for part in Component
        if any(row[part] for row in rows)
    }


def _amounts(
    stream: MemoryStream, found: AllocatorReplay, ground: DeviceModel
) -> tuple[Amount, Amount]:
    """Return allocated and reserved bytes, as wide as trace and workspaces are uncertain."""
    margin, (small, large) = ground.margin(stream), ground.reserve_margins(stream)
    low = high = found
    if _guesses_convolution(stream, ground):
        low, high = (
            replay(with_convolution_bytes(stream, change), ground.settings)
            for change in (lambda _: 0, lambda size: max(size, MOST_CONVOLUTION_BYTES))
        )
    less, more = compiled_spread(stream)

    def wide(name: str, source: NumberSource, below: float, above: float) -> Amount:
        least, own, most = (getattr(one, name) for one in (low, found, high))
        return Amount(
            bytes=own,
            source=source,
            low=int((min(least, own) - less) * (1 - below)),
            high=ceil((max(own, most) + more) * (1 + above)),
        )

    return (
        wide("peak_allocated", NumberSource.TRACED, margin, margin),
        wide("peak_reserved", NumberSource.SIMULATED, large, small),
    )


def compiled_spread(stream: MemoryStream) -> tuple[int, int]:
    """Return how many bytes less and more a compiled step may take than the traced, eager one.

    What it keeps less for backward is taken to be gone at the peak; what fusion saves of
    temporaries beyond that is not counted.
    """
    kept, eager = stream.compiled_kept_bytes, stream.eager_kept_bytes
    if kept is None or eager is None:
        return 0, 0
    return max(0, eager - kept), max(0, kept - eager)


def _components(
    at_peak: Mapping[Component, int],
    reserved: Amount,
    ground: DeviceModel,
    stream: MemoryStream,
) -> dict[str, Amount]:
    """Return the table: what is alive at the peak, what is between, what is outside."""
    found = {
        part.value: Amount(bytes=at_peak.get(part, 0), source=NumberSource.TRACED)
        for part in Component
        if part is not Component.WORKSPACE
    }
    workspace = at_peak.get(Component.WORKSPACE, 0)
    found["workspace"] = Amount(
        bytes=workspace,
        source=ground.calibration.cublas_workspace.source,
        low=min(workspace, HANDLES * ground.calibration.cublas_workspace.bytes),
        high=workspace + (MOST_CONVOLUTION_BYTES if _guesses_convolution(stream, ground) else 0),
    )
    rest = reserved.bytes - sum(at_peak.values())
    found["fragmentation"] = Amount(bytes=rest, source=NumberSource.SIMULATED)
    found["context"] = ground.calibration.context
    if ground.ranks > 1:
        found["nccl"] = ground.calibration.nccl
    return found


def _guesses_convolution(stream: MemoryStream, ground: DeviceModel) -> bool:
    """Return whether what convolutions take was measured on another GPU than this one."""
    return ground.calibration.trace_error is None and has_convolution(stream)


def _tensors(stream: MemoryStream, position: int) -> list[TensorAtPeak]:
    return [
        TensorAtPeak(
            bytes=allocation.size,
            shape=allocation.shape,
            dtype=allocation.dtype,
            line=allocation.line,
            phase=allocation.phase.value,
            module=allocation.module,
            kind=KINDS.get(allocation.component, ""),
            operator=allocation.operator,
        )
        for allocation in (
            stream.allocations[index] for index in alive_at(stream, position)[:MOST_TENSORS]
        )
    ]


def accumulating(setup: Setup, largest: int | None) -> Accumulating | None:
    """Return how to keep a batch that does not fit as a whole."""
    batch, at = setup.stream.batch, setup.at
    if batch is None or at is None or not largest:
        return None
    limit, settings = setup.ground.limit(setup.stream), setup.ground.settings
    return accumulation(
        batch, largest, lambda size: fits_steadily(accumulated(at(size)), limit, settings)
    )
