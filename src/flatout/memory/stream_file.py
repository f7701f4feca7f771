"""An allocation stream as plain values and back: columns, with each text written once."""

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.memory.stream import (
    Allocation,
    Component,
    Mark,
    MemoryStream,
    Phase,
    StreamEvent,
)

SCHEMA = "flatout.memory_stream/1"
TEXTS = ("operator", "module", "line", "dtype")
"""Fields of an allocation that repeat."""
PLAIN = ("size", "step", "shape", "stream", "used_on")
DEATH = -1
"""The sign of a death: an event is its allocation's number from 1, negative where it dies."""


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
        "device": stream.device,
        "method": stream.method,
        "steps": stream.steps,
        "batch": stream.batch,
        "model_flops": stream.model_flops,
        "compiled_kept_bytes": stream.compiled_kept_bytes,
        "eager_kept_bytes": stream.eager_kept_bytes,
        "notes": list(stream.notes),
    }


def stream_from_json(plain: Mapping[str, Any]) -> MemoryStream:
    """Return the stream that `stream_to_json` wrote.

    Raises:
        ValueError: if the schema is another one.
    """
    if plain.get("schema") != SCHEMA:
        raise ValueError(f"not a {SCHEMA} record: schema is {plain.get('schema')!r}")
    return MemoryStream(
        allocations=_allocations(plain["allocations"], plain["texts"]),
        events=tuple(StreamEvent(abs(n) - 1, n > 0) for n in plain["events"]),
        marks=tuple(Mark(at, Phase(phase), step) for at, phase, step in plain["marks"]),
        device=plain["device"],
        method=plain["method"],
        steps=plain["steps"],
        batch=plain["batch"],
        model_flops=plain["model_flops"],
        compiled_kept_bytes=plain["compiled_kept_bytes"],
        eager_kept_bytes=plain.get("eager_kept_bytes"),
        notes=tuple(plain["notes"]),
    )


_ENUMS = {"component": Component, "phase": Phase}


def _allocations(
    columns: Mapping[str, Sequence[Any]], texts: Sequence[str]
) -> tuple[Allocation, ...]:
    names = (*PLAIN, *TEXTS, *_ENUMS)
    rows = zip(*(columns[name] for name in names), strict=True)
    found = []
    for row in rows:
        values = dict(zip(names, row, strict=True))
        values |= {name: texts[values[name]] for name in TEXTS}
        values |= {name: kind(texts[values[name]]) for name, kind in _ENUMS.items()}
        values |= {name: tuple(values[name]) for name in ("shape", "used_on")}
        found.append(Allocation(**values))
    return tuple(found)
