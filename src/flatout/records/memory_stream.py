"""What the traced training steps allocate: the record between the tracer and the allocator.

`MemoryStream` is the record, `stream_to_json` its columns, each text written once. `Draft` changes
one: sizes, births and deaths. `repeated` makes a stream of two steps one of many.
"""

import functools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

SCHEMA = "flatout.memory_stream/1"
TEXTS = ("operator", "module", "line", "dtype")
"""Fields of an allocation that repeat."""
PLAIN = ("size", "step", "shape", "arguments")
ABOUT = (
    *("device", "method", "steps", "batch", "micro_batches", "model_flops", "tf32_share"),
    *("compiled_kept_bytes", "eager_kept_bytes", "spreads_itself", "traced_s"),
)
"""Fields of the whole stream that are written as they are."""
DEATH = -1
"""The sign of a death: an event is its allocation's number from 1, negative where it dies."""
Place = tuple[int, int, int]
"""An event's position in the old stream, 0 for what goes before it, and the order of adding."""


class Component(Enum):
    """What an allocation is for, as the plan names it."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    """Made in a forward and alive when its backward starts."""
    INPUTS = "inputs"
    TEMPORARIES = "temporaries"
    WORKSPACE = "workspace"
    """cuBLAS, cuDNN and the buffers that kernels take inside: never seen by a tracer."""


class Phase(Enum):
    """Where in a step an allocation was made."""

    SETUP = "setup"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One storage on the traced device, from its birth to its death."""

    size: int
    """Bytes as asked for; the allocator rounds."""
    component: Component
    phase: Phase
    step: int
    """Optimizer step it was born in, from 0; setup belongs to step 0."""
    operator: str = ""
    """The operator that made it, as `aten.addmm.default`."""
    module: str = ""
    """Dotted name of the module that was running, empty outside the root."""
    line: str = ""
    """`file.py:line`, innermost line outside torch; empty if unknown."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    arguments: tuple[tuple[int, ...], ...] = ()
    """What the operator was called with, where its kernel takes memory of its own: shapes and
    numbers, and 1 in the end where pictures are stored channels last. Of a call's first result."""


class StreamEvent(NamedTuple):
    """The birth or the death of an allocation."""

    index: int  # type: ignore[assignment]  # tuples have a method of that name
    """Position in `MemoryStream.allocations`."""
    born: bool
    """False when it dies here."""


class Mark(NamedTuple):
    """From this event on the training is in this phase of this step."""

    at: int
    """Position in `MemoryStream.events`."""
    phase: Phase
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStream:
    """All allocations of the traced steps in the order in which they happened."""

    allocations: tuple[Allocation, ...]
    events: Sequence[StreamEvent]
    marks: tuple[Mark, ...]
    device: str
    """`cuda` (virtual or real) or `cpu`."""
    method: str
    """How it was traced: `virtual_cuda`, `cuda_fake`, `cpu_fake`, `real`."""
    steps: int
    batch: int | None = None
    """Samples per micro-batch, where it is known."""
    micro_batches: int = 1
    """Of the last traced step: more than one where gradients are accumulated."""
    model_flops: float = 0.0
    """Of the last traced step, forward and backward, by torch's own counting; 0 if unknown."""
    tf32_share: float = 0.0
    """Of these, what torch may compute in TF32 on a device that has it."""
    compiled_kept_bytes: int | None = None
    """What a compiled step keeps for backward, by AOTAutograd's partition; None where nothing is
    compiled or it could not be found. The stream itself is that of eager code."""
    eager_kept_bytes: int | None = None
    """What the traced, eager code of the same part keeps, where the above was found."""
    spreads_itself: bool = False
    """Whether the training made a process group of several ranks: `batch` is that of one rank, and
    buckets or shards are in the stream."""
    traced_s: float = field(default=0.0, compare=False)
    """Seconds that tracing took; 0 where no one looked."""
    notes: tuple[str, ...] = ()
    """What could not be traced and what was assumed instead, one clause each."""

    def alive(self) -> list[int]:
        """Return the allocated bytes after every event, unrounded."""
        total, course = 0, []
        for event in self.events:
            size = self.allocations[event.index].size
            total += size if event.born else -size
            course.append(total)
        return course


_ENUMS = {"component": Component, "phase": Phase}


def stream_to_json(stream: MemoryStream) -> dict[str, Any]:
    """Return the `flatout.memory_stream/1` mapping."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    rows = stream.allocations
    columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in PLAIN}
    columns |= {name: [number(getattr(row, name)) for row in rows] for name in TEXTS}
    columns |= {name: [number(getattr(row, name).value) for row in rows] for name in _ENUMS}
    return {
        "schema": SCHEMA,
        "allocations": columns,
        "texts": list(texts),
        "events": [(e.index + 1) * (1 if e.born else DEATH) for e in stream.events],
        "marks": [[mark.at, mark.phase.value, mark.step] for mark in stream.marks],
        "notes": list(stream.notes),
        **{name: getattr(stream, name) for name in ABOUT},
    }


def stream_from_json(plain: Mapping[str, Any]) -> MemoryStream:
    """Return the stream that `stream_to_json` wrote."""
    if plain.get("schema") != SCHEMA:
        raise ValueError(f"not a {SCHEMA} record: schema is {plain.get('schema')!r}")
    names, texts = (*PLAIN, *TEXTS, *_ENUMS), plain["texts"]
    found = []
    for row in zip(*(plain["allocations"][name] for name in names), strict=True):
        values = dict(zip(names, row, strict=True))
        values |= {name: texts[values[name]] for name in TEXTS}
        values |= {name: kind(texts[values[name]]) for name, kind in _ENUMS.items()}
        values["shape"] = tuple(values["shape"])
        values["arguments"] = tuple(map(tuple, values["arguments"]))
        found.append(Allocation(**values))
    return MemoryStream(
        allocations=tuple(found),
        events=tuple(StreamEvent(abs(n) - 1, n > 0) for n in plain["events"]),
        marks=tuple(Mark(at, Phase(phase), step) for at, phase, step in plain["marks"]),
        notes=tuple(plain["notes"]),
        **{name: plain[name] for name in ABOUT if name in plain},
    )


class Life(NamedTuple):
    """Positions of an allocation's birth and death among the events; None for one that stays."""

    birth: int
    death: int | None


def lives_of(stream: MemoryStream) -> list[Life]:
    """Return when each allocation is born and when it dies."""
    births = [0] * len(stream.allocations)
    deaths: list[int | None] = [None] * len(births)
    for position, (index, born) in enumerate(stream.events):
        if born:
            births[index] = position
        else:
            deaths[index] = position
    return list(map(Life, births, deaths))


def step_bounds(stream: MemoryStream, step: int) -> tuple[int, int]:
    """Return the positions between which a step's events lie."""
    starts = [mark.at for mark in stream.marks if mark.step == step and mark.phase != Phase.SETUP]
    later = [mark.at for mark in stream.marks if mark.step > step]
    return min(starts, default=len(stream.events)), min(later, default=len(stream.events))


class Draft:
    """An allocation stream that is being changed; `build` returns the new one."""

    def __init__(self, stream: MemoryStream) -> None:
        self.stream = stream
        self._allocations = list(stream.allocations)
        self._births: dict[int, Place | None] = {}
        """Of what was added or dropped; None where it has none any more."""
        self._deaths: dict[int, Place | None] = {}
        """Of what was added, dropped, or dies at another time; None where it does not."""
        self._count = 0

    @functools.cached_property
    def lives(self) -> list[Life]:
        """When each allocation of the old stream is born and when it dies."""
        return lives_of(self.stream)

    def resize(self, index: int, size: int) -> None:
        """Give an allocation another size."""
        self._allocations[index] = replace(self._allocations[index], size=max(0, size))

    def drop(self, index: int) -> None:
        """Leave an allocation out."""
        self._births[index] = self._deaths[index] = None

    def die_before(self, index: int, position: int | None) -> None:
        """Let an allocation die right before this event of the old stream; None lets it stay."""
        self._deaths[index] = None if position is None else self._before(position)

    def add(self, allocation: Allocation, birth: int, death: int | None) -> None:
        """Add an allocation that lives from before one event of the old stream to another."""
        index = len(self._allocations)
        self._allocations.append(allocation)
        self._births[index] = self._before(birth)
        self._deaths[index] = None if death is None else self._before(death)

    def build(self, *notes: str) -> MemoryStream:
        """Return the changed stream; notes say what was changed."""
        notes = (*self.stream.notes, *notes)
        births, deaths = self._births, self._deaths
        if not births and not deaths:
            return replace(self.stream, allocations=tuple(self._allocations), notes=notes)
        dropped = {index for index, place in births.items() if place is None}
        places: list[tuple[int, int, int, int, bool]] = [
            (position, 1, 0, index, born)
            for position, (index, born) in enumerate(self.stream.events)
            if index not in (births if born else deaths) and index not in dropped
        ]
        for changed, born in ((births, True), (deaths, False)):
            places += [
                (*place, index, born)
                for index, place in changed.items()
                if place is not None and index not in dropped
            ]
        places.sort()
        kept = [index for index in range(len(self._allocations)) if index not in dropped]
        number = {index: position for position, index in enumerate(kept)}
        return replace(
            self.stream,
            allocations=tuple(self._allocations[index] for index in kept),
            events=[StreamEvent(number[place[3]], place[4]) for place in places],
            marks=tuple(
                Mark(bisect_left(places, (mark.at, 0, 0)), mark.phase, mark.step)
                for mark in self.stream.marks
            ),
            notes=notes,
        )

    def _before(self, position: int) -> Place:
        self._count += 1
        return position, 0, self._count


class NotSteadyError(Exception):
    """The last traced step does not end as it began, so it cannot be repeated."""


def repeated(stream: MemoryStream, times: int) -> MemoryStream:
    """Return the stream with its last step played this many times more.

    What the last step leaves behind takes the place of what it found and freed: the gradients of
    the step before, the last loss. That is what a training does from its second step on.
    """
    last = stream.steps - 1
    start, end = step_bounds(stream, last)
    if last < 1 or start >= end:
        raise NotSteadyError("two traced steps are needed")
    successor = _successors(stream, start, end)
    allocations = list(stream.allocations)
    events = list(stream.events[:end])
    marks = [mark for mark in stream.marks if mark.at < end]
    renamed = {index: index for index in range(len(allocations))}
    for turn in range(1, times + 1):
        shift = len(events) - start
        within = [mark for mark in stream.marks if start <= mark.at < end]
        marks += [Mark(mark.at + shift, mark.phase, last + turn) for mark in within]
        now: dict[int, int] = {}
        for index, born in stream.events[start:end]:
            if born:
                now[index] = len(allocations)
                allocations.append(allocations[index])
            which = now[index] if index in now else renamed[successor[index]]
            events.append(StreamEvent(which, born))
        renamed |= now
    return replace(
        stream,
        allocations=tuple(allocations),
        events=events,
        marks=tuple(marks),
        steps=stream.steps + times,
    )


def _successors(stream: MemoryStream, start: int, end: int) -> dict[int, int]:
    """Return for each allocation that the step found and freed the one it leaves in its place."""
    found, left = [], []
    for index, (birth, death) in enumerate(lives_of(stream)):
        if birth < start and death is not None and start <= death < end:
            found.append((birth, index))
        elif start <= birth < end and (death is None or death >= end):
            left.append((birth, index))
    before, after = ([index for _birth, index in sorted(places)] for places in (found, left))
    sizes = [stream.allocations[index].size for index in before]
    if sizes != [stream.allocations[index].size for index in after]:
        raise NotSteadyError("the last traced step leaves other sizes behind than it found")
    return dict(zip(before, after, strict=True))
