"""Pack the data for a tuning: a sample of them says what all would take, in time and on the disk.

Where that is a small part of the tuning's time, all are packed, and the store is tried as any other
technique, in fresh pairs. Where it is not, a sample is packed and stands for all in pairs that show
what packing would bring; the report has that, the cost of all, and the command.
"""

import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.data.format import (
    HEADER,
    RAISE,
    STAGING,
    STORES,
    TIMED_SAMPLE,
    Encoding,
    Header,
    read_header,
)
from flatout.data.sources import open_source
from flatout.data.sources.source import Source, SourceSample
from flatout.data.staging import locked
from flatout.data.writer import ESTIMATE_SAMPLES, PackOptions, estimated, pack_held
from flatout.hardware.limits import usable_cores
from flatout.records import catalogue
from flatout.records.live import Tell
from flatout.records.messages import words
from flatout.records.recipe import Choice
from flatout.records.units import format_bytes, format_duration
from flatout.tuning.feeding import StoredSample
from flatout.workflow.pack import pack

COMMAND = "flatout pack"
STORE, SAMPLE_STORE = "data.packed", "sample.packed"
SAMPLE = "pack-sample"
TIME_SHARE = 0.25
"""Of the budget, that packing all may take: the proof that it pays needs the rest."""
SAMPLE_SHARE = 0.05
"""Of the budget, that packing a sample may take."""
DISK_SHARE = 0.5
"""Of the free disk that a store may take that the user did not ask for."""
MOST_SAMPLE_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCost:
    """What packing all of the data takes."""

    target: str
    samples: int
    seconds: float
    bytes: int
    free_bytes: int
    encoding: str = "raw"
    is_packed: bool = False
    """Whether it was done; then these are measured, else they follow from a sample."""
    seen: int = 0
    """Samples that were packed to know it."""
    sample: StoredSample | None = None
    """What stands for all in the tuning, where they were not packed."""

    def fits(self, budget_s: float) -> bool:
        """Return whether packing all is a small part of a budget and of the disk."""
        is_quick = self.seconds <= TIME_SHARE * budget_s
        return is_quick and self.bytes <= DISK_SHARE * self.free_bytes

    @property
    def sentence(self) -> str:
        """One sentence for the report."""
        return words(
            f"tune_note.{'packed' if self.is_packed else 'not_packed'}",
            samples=str(self.samples),
            target=self.target,
            time=format_duration(self.seconds),
            size=format_bytes(self.bytes),
            n=str(self.seen),
            free=format_bytes(self.free_bytes),
            command=f"{COMMAND} {self.target} {STORE} --encode {self.encoding}",
        )


def pack_for_tuning(target: str, out: Path, budget_s: float, tell: Tell) -> PackCost:
    """Pack the data, or a sample where all do not fit into the tuning, for it to try.

    Returns what packing all takes.

    Raises:
        UserError: for whatever keeps the data from being packed.
    """
    store = out / STORE
    if (store / HEADER).is_file():
        kind = read_header(store).encoding.kind  # of this tuning, before it was interrupted
    else:
        cost = _cost_or_sample(target, out, budget_s, tell)
        kind = cost.encoding
        if cost.sample is not None:
            return cost
    options = PackOptions(encoding=Encoding(kind=kind), workers=usable_cores())
    done = pack(target, store, options, tell)
    named = [part for part in os.environ.get(STORES, "").split(os.pathsep) if part]
    os.environ[STORES] = os.pathsep.join([*named, str(store.resolve())])
    return PackCost(
        target=target,
        samples=done.header.samples,
        seconds=done.seconds,
        bytes=bytes_of(done.header),
        free_bytes=0,
        is_packed=True,
    )


def _cost_or_sample(target: str, out: Path, budget_s: float, tell: Tell) -> PackCost:
    """Return what packing all takes, with a packed sample where that is too much."""
    try:
        source = open_source(target, work=out / SAMPLE, on_bad=RAISE)
        cost = cost_of(source, target, out)
        if cost.fits(budget_s):
            return cost
        header = _packed_sample(source, out / SAMPLE_STORE, cost, budget_s, tell)
        return replace(cost, sample=_stored_sample(header, out / SAMPLE_STORE))
    finally:
        shutil.rmtree(out / SAMPLE, ignore_errors=True)  # all of a Parquet, written out as Arrow


def cost_of(source: Source, target: str, out: Path) -> PackCost:
    """Return how to store the data, and what all would take, from some packed on one core.

    Images are stored as pixels, which saves the decoding; other data as they are.
    """
    has_images = any(field.kind == "image" for field in source.contents.fields)
    kind = "raw" if has_images else "original"
    began = time.monotonic()
    estimate = estimated(source, out, PackOptions(encoding=Encoding(kind=kind)))
    seen = min(ESTIMATE_SAMPLES, len(source))
    each_s = (time.monotonic() - began) / seen
    return PackCost(
        target=target,
        samples=len(source),
        seconds=each_s * len(source) / usable_cores(),
        bytes=estimate.bytes,
        free_bytes=estimate.free_bytes,
        encoding=kind,
        seen=seen,
    )


def _packed_sample(
    source: Source, store: Path, cost: PackCost, budget_s: float, tell: Tell
) -> Header:
    """Return the header of a packed sample: of an earlier tuning of the same data, or a new one."""
    header = read_header(store) if (store / HEADER).is_file() else None
    if header is not None:
        same = SourceSample(whole=source, size=int(header.source["samples"]))
        if header.source["fingerprint"] == same.fingerprint():
            return header
    if (store / STAGING).is_dir() or (header is not None and header.sample_of):
        shutil.rmtree(store)  # of other data, or unfinished: its size follows from the speed then
    affordable = int(len(source) * SAMPLE_SHARE * budget_s / cost.seconds)
    room = min(MOST_SAMPLE_BYTES, DISK_SHARE * cost.free_bytes)
    fitting = int(len(source) * room / max(1, cost.bytes))
    size = min(len(source), fitting, max(ESTIMATE_SAMPLES, affordable))
    # Samples that cannot be read are no reason to end the tuning: packing all will name them.
    options = PackOptions(
        encoding=Encoding(kind=cost.encoding), workers=usable_cores(), on_bad="skip"
    )
    with locked(store):
        return pack_held(SourceSample(whole=source, size=max(1, size)), store, options, tell)


def _stored_sample(header: Header, store: Path) -> StoredSample:
    """Return what a tuning has to know of a packed sample, and let its trials read it."""
    path = str(store.resolve())
    os.environ[TIMED_SAMPLE] = path
    return StoredSample(
        choice=Choice(technique=packed_technique(), settings={"path": path}),
        samples=header.samples,
        mean_bytes=bytes_of(header) / header.samples,
    )


def packed_technique() -> str:
    """Return the name of the technique that reads packed stores."""
    prepared_by = catalogue.declared("prepared_by").items()
    return next(name for name, command in prepared_by if command == COMMAND)


def bytes_of(header: Header) -> int:
    """Return what the records of a store take on the disk."""
    return sum(shard.bytes for shard in header.shards)
