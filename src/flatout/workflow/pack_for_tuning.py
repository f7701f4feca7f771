"""Pack the data for a tuning: a sample of them says what all would take, in time and on the disk.

Where that is a small part of the tuning's time, all are packed, and the store is tried as any other
technique, in fresh pairs. Where it is not, the report has the cost and the command.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from flatout.data.format import HEADER, RAISE, STORES, Encoding, read_header
from flatout.data.sources import open_source
from flatout.data.writer import ESTIMATE_SAMPLES, PackOptions, estimated
from flatout.hardware.limits import usable_cores
from flatout.records.live import Tell
from flatout.records.messages import words
from flatout.records.units import format_bytes, format_duration
from flatout.workflow.pack import pack

STORE = "data.packed"
SAMPLE = "pack-sample"
TIME_SHARE = 0.25
"""Of the budget, that packing all may take: the proof that it pays needs the rest."""
DISK_SHARE = 0.5
"""Of the free disk that a store may take that the user did not ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCost:
    """What packing all of the data takes."""

    target: str
    samples: int
    seconds: float
    bytes: int
    free_bytes: int
    is_packed: bool = False
    """Whether it was done; then these are measured, else they follow from a sample."""
    seen: int = 0
    """Samples that were packed to know it."""

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
            store=STORE,
        )


def pack_for_tuning(target: str, out: Path, budget_s: float, tell: Tell) -> PackCost:
    """Pack the data, if that fits into the tuning, for it to try; return what packing all takes.

    Raises:
        UserError: for whatever keeps the data from being packed.
    """
    store = out / STORE
    if (store / HEADER).is_file():
        kind = read_header(store).encoding.kind  # of this tuning, before it was interrupted
    else:
        kind, cost = cost_of(target, out)
        if not cost.fits(budget_s):
            return cost
    options = PackOptions(encoding=Encoding(kind=kind), workers=usable_cores())
    done = pack(target, store, options, tell)
    named = [part for part in os.environ.get(STORES, "").split(os.pathsep) if part]
    os.environ[STORES] = os.pathsep.join([*named, str(store.resolve())])
    return PackCost(
        target=target,
        samples=done.header.samples,
        seconds=done.seconds,
        bytes=sum(shard.bytes for shard in done.header.shards),
        free_bytes=0,
        is_packed=True,
    )


def cost_of(target: str, out: Path) -> tuple[str, PackCost]:
    """Return how to store the data, and what all would take, from a sample packed on one core.

    Images are stored as pixels, which saves the decoding; other data as they are.
    """
    source = open_source(target, work=out / SAMPLE, on_bad=RAISE)
    has_images = any(field.kind == "image" for field in source.contents.fields)
    kind = "raw" if has_images else "original"
    began = time.monotonic()
    estimate = estimated(source, out, PackOptions(encoding=Encoding(kind=kind)))
    seen = min(ESTIMATE_SAMPLES, len(source))
    each_s = (time.monotonic() - began) / seen
    cost = PackCost(
        target=target,
        samples=len(source),
        seconds=each_s * len(source) / usable_cores(),
        bytes=estimate.bytes,
        free_bytes=estimate.free_bytes,
        seen=seen,
    )
    return kind, cost
