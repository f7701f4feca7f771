"""Write one file shard: read, check, encode, hash; a function of the plan and the source alone."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from flatout.data import encode, staging, values
from flatout.data.crew import Tick
from flatout.data.format import (
    ENTRY,
    HASH_BYTES,
    NO_LABEL,
    checksum,
    content_hash,
    join_record,
    shard_name,
)
from flatout.data.refusals import BadSample, Skipped, refuse
from flatout.data.sources.source import Source
from flatout.data.staging import Part, Plan

TICK_SAMPLES = 64
"""Samples between two ticks."""
Shape = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class WriteShard:
    """The job of a worker."""

    source: Source
    plan: Plan
    folder: Path
    order: "np.ndarray[tuple[int], np.dtype[np.int64]]"

    def __call__(self, number: int, tick: Tick) -> int:
        """Write the file shard of that number and its part; return its samples."""
        path = self.folder / shard_name(number)
        draft = path.with_name(f"{path.name}{staging.DRAFT}{os.getpid()}")
        try:
            with draft.open("wb") as file:
                records = _Records(self, number, file, tick)
                records.write()
                file.flush()
                staging.sync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        staging.write_part(self.folder, number, records.part())
        return len(records.rows)


class _Records:
    """The records of one shard, while they are written."""

    def __init__(self, job: WriteShard, number: int, file: IO[bytes], tick: Tick) -> None:
        self.job, self.number, self.file, self.tick = job, number, file, tick
        contents = job.source.contents
        self.fields = contents.fields
        self.stored = encode.stored_fields(contents.fields, job.plan.encoding)
        names = [field.name for field in contents.fields]
        self.label_at = names.index(contents.label) if contents.label else -1
        self.rows: list[tuple[Any, ...]] = []
        self.names: list[str] = []
        self.skipped: list[Skipped] = []
        self.shapes: list[set[Shape]] = [set() for _ in self.stored]
        self.at = 0

    def write(self) -> None:
        span = self.job.plan.span(self.number)
        for count, original in enumerate(self.job.order[span.start : span.stop], start=1):
            self._write_one(int(original))
            if count % TICK_SAMPLES == 0 or count == len(span):
                self.tick((count - 1) % TICK_SAMPLES + 1)

    def _write_one(self, original: int) -> None:
        source, plan = self.job.source, self.job.plan
        try:
            sample = source.read(original)
            parts = encode.source_parts(self.fields, sample)
            stored = encode.encoded_parts(self.fields, parts, plan.encoding)
        except BadSample as error:
            name = source.name(original)
            refuse(name, str(error), on_bad=plan.on_bad, skipped=self.skipped)
            return
        record = join_record(stored)
        label = sample[self.label_at] if self.label_at >= 0 else NO_LABEL
        digest = np.frombuffer(content_hash(parts), np.uint8, HASH_BYTES)
        place = (self.number, self.at, len(record), original)
        self.rows.append((*place, label, checksum(record), digest))
        if source.contents.is_named:
            self.names.append(source.name(original))
        for shapes, field, payload in zip(self.shapes, self.stored, stored, strict=True):
            shapes.add(values.shape_of(field, payload))
        self.file.write(record)
        self.at += len(record)

    def part(self) -> Part:
        return Part(
            entries=np.array(self.rows, dtype=ENTRY),
            names=self.names,
            skipped=self.skipped,
            bytes=self.at,
            shapes=[next(iter(shapes)) if len(shapes) == 1 else None for shapes in self.shapes],
        )
