"""Reading from slow storage: files and a packed store, at random, in blocks and read ahead.

The storage is a real one to its readers: a FUSE file system that lets every request wait for its
seek and its bytes (`benchmarks/slow_storage.py`), once as a disk with one arm, once as a share in a
network. Before each way of reading all of its files are dropped from the page cache.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

import flatout.data
from benchmarks.bench import Bench, Record, TrialFailedError, cells, make_photographs
from benchmarks.slow_storage import Speed, counts_of, find_missing, mounted
from benchmarks.suites.pack import MAX_RESIDENT, pack_once, repeated, spread
from flatout.data.format import read_header
from flatout.data.packed_store import evict, resident_share
from flatout.data.reader import PackedDataset
from flatout.data.sampler import BlockSampler, OrderOptions, permutation
from flatout.records.ablation import Comparison
from flatout.records.statistics import compare, gather
from flatout.techniques.data import read_ahead

THEME = "slow_storage"
STORAGES: Mapping[str, Speed] = {
    "disk": Speed(seek_ms=10.0, mb_per_s=100.0, at_once=1),
    "network": Speed(seek_ms=2.0, mb_per_s=100.0, at_once=16),
}
PHOTOGRAPHS, REPEATS = 1650, 5
"""In the store two windows of block order, 8,250 samples; as files each photograph once."""
DRAWN = 256
"""Samples that are read at random: a whole epoch of them would take minutes."""
BATCH = 64
BATCHES_AHEAD = 4
STEP_S = 0.4
"""Of the training that reading ahead is tried alongside; it sleeps, as one on a device does."""
ROUNDS = 4
LEAST_RATIO = 2.5
FILES, ONE_BY_ONE = "files at random", "store at random, one by one"
BATCHES, AHEAD = "store at random, in batches", "store at random, read ahead"
BLOCKS, STRAIGHT = "store in block order", "store straight on"
WARMED = "store warmed up, then at random"
TRAINED, TRAINED_AHEAD = "training on the store", "training on the store, read ahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What is read: the photographs as files, and packed."""

    files: Sequence[Path]
    folder: Path

    @property
    def shards(self) -> list[Path]:
        """The files of the store that hold samples."""
        return [self.folder / shard.name for shard in read_header(self.folder).shards]

    def opened(self) -> PackedDataset:
        """Open the store again: a mapped page cannot be dropped."""
        return flatout.data.open(self.folder, decode="bytes")


Read = Callable[[Stored, int], int]
"""Reads in the order of a round; returns the bytes of the samples."""


def run(bench: Bench) -> Record:
    """Make the photographs, mount them slowly, read them in every way in turns."""
    missing = find_missing()
    if missing:
        raise TrialFailedError(missing)
    data = bench.work / "data"
    photographs = make_photographs(data / "photographs", PHOTOGRAPHS)
    pack_once(repeated(photographs, REPEATS, "again.csv"), data / "packed")
    measured = []
    for name, speed in STORAGES.items():
        with mounted(data, bench.work / name, speed) as mount:
            stored = Stored(
                files=sorted((mount / "photographs").glob("*/*.jpg")), folder=mount / "packed"
            )
            measured += read_in_turns(name, stored, mount, bench.say)
    return record_of(measured)


def read_in_turns(
    storage: str, stored: Stored, mount: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Read in every way, round by round, the order turned round every time."""
    measured = []
    for number in range(ROUNDS):
        for way in list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]:
            row = {"storage": storage, "way": way, "round": number}
            paths = stored.files if way == FILES else stored.shards
            row |= timed(partial(WAYS[way], stored, number), paths, mount)
            measured.append(row)
            say(f"  {storage}, {way}: {rate_of(row):.1f} MB/s, {row['requests']} requests")
    return measured


def timed(read: Callable[[], int], paths: Sequence[Path], mount: Path) -> dict[str, Any]:
    """Return the time of one way in one round, and what it asked the storage for."""
    read_ahead.ASKS.clear()
    gc.collect()  # a data set that lives still has its pages mapped, and these stay
    for path in paths:
        evict(path)
    resident = resident_share(paths)
    if resident is None or resident > MAX_RESIDENT:
        raise TrialFailedError(f"{resident} of the files stayed in memory; not cold")
    before, started = counts_of(mount), time.perf_counter()
    count = read()
    wall_s = time.perf_counter() - started
    asked = {name: value - before[name] for name, value in counts_of(mount).items()}
    return {"wall_s": wall_s, "sample_bytes": count, **asked}


def files_at_random(stored: Stored, number: int) -> int:
    """Read whole files."""
    order = permutation(len(stored.files), seed=0, epoch=number)[:DRAWN]
    return sum(len(stored.files[place].read_bytes()) for place in order)


def one_by_one(stored: Stored, number: int) -> int:
    """Read single samples of a full permutation."""
    data = stored.opened()
    return sum(size_of(data[int(place)]) for place in _drawn(data, number))


def in_batches(stored: Stored, number: int) -> int:
    """Read the same samples in whole batches, as a loader asks for them."""
    return sum(_batches(DataLoader(**_arguments(stored, number))))


def read_ahead_of(stored: Stored, number: int) -> int:
    """Read the same batches with the technique that asks for the coming ones."""
    return sum(_batches(_ahead(stored, number)))


def trained(stored: Stored, number: int) -> int:
    """Read the same batches, each with a step after it."""
    return _trained(DataLoader(**_arguments(stored, number)))


def trained_ahead(stored: Stored, number: int) -> int:
    """Do the same with the technique."""
    return _trained(_ahead(stored, number))


def in_blocks(stored: Stored, number: int) -> int:
    """Read a whole epoch in block order."""
    data = stored.opened()
    sampler = BlockSampler(data.store, OrderOptions(block=16), is_reordered=False)
    sampler.set_epoch(number)
    return sum(size_of(data[place]) for place in sampler)


def straight_on(stored: Stored, number: int) -> int:
    """Read the first samples of the store as they lie."""
    data = stored.opened()
    return sum(size_of(data[place]) for place in range(12 * DRAWN))


def warmed_up(stored: Stored, number: int) -> int:
    """Bring the whole store into memory, then read an epoch of a full permutation."""
    data = stored.opened()
    read_ahead.warm_up(data).wait()
    order = permutation(len(data), seed=0, epoch=number)
    return sum(size_of(data[int(place)]) for place in order)


WAYS: Mapping[str, Read] = {
    FILES: files_at_random,
    ONE_BY_ONE: one_by_one,
    BATCHES: in_batches,
    AHEAD: read_ahead_of,
    BLOCKS: in_blocks,
    STRAIGHT: straight_on,
    WARMED: warmed_up,
    TRAINED: trained,
    TRAINED_AHEAD: trained_ahead,
}
PAIRS = (
    (ONE_BY_ONE, BLOCKS),
    (ONE_BY_ONE, STRAIGHT),
    (FILES, BLOCKS),
    (ONE_BY_ONE, BATCHES),
    (ONE_BY_ONE, AHEAD),
    (ONE_BY_ONE, WARMED),
    (TRAINED, TRAINED_AHEAD),
)
"""What is compared: base and way."""


def size_of(sample: Any) -> int:
    """Return the bytes of a photograph's file: of the table's only column."""
    return len(sample["path"])


def _sizes(samples: Sequence[Any]) -> int:
    return sum(map(size_of, samples))


def _drawn(data: PackedDataset, number: int) -> list[int]:
    """Return the samples of a round, as torch's own sampler draws them."""
    return list(_sampler(data, number))


def _sampler(data: PackedDataset, number: int) -> RandomSampler:
    seeded = torch.Generator().manual_seed(number)
    return RandomSampler(data, num_samples=DRAWN, generator=seeded)


def _arguments(stored: Stored, number: int) -> dict[str, Any]:
    data = stored.opened()
    sampler = _sampler(data, number)
    return {"dataset": data, "batch_size": BATCH, "sampler": sampler, "collate_fn": _sizes}


def _ahead(stored: Stored, number: int) -> Iterator[int]:
    loader = DataLoader(**_arguments(stored, number))
    return read_ahead.read_ahead(loader, batches_ahead=BATCHES_AHEAD)


def _batches(batches: Any) -> Iterator[int]:
    yield from batches


def _trained(batches: Any) -> int:
    total = 0
    for count in batches:
        total += count
        time.sleep(STEP_S)
    return total


def rate_of(row: Mapping[str, Any]) -> float:
    """Return megabytes of samples a second."""
    return float(row["sample_bytes"]) / float(row["wall_s"]) / 1e6


def rows_of(measured: Sequence[Mapping[str, Any]], storage: str, way: str) -> list[Any]:
    """Return what was measured of one way, in the order of the rounds."""
    mine = [row for row in measured if (row["storage"], row["way"]) == (storage, way)]
    return sorted(mine, key=lambda row: int(row["round"]))


def against(measured: Sequence[Mapping[str, Any]], storage: str, base: str, way: str) -> Comparison:
    """Return how many times faster a way is, by the rounds that both ran in."""
    seconds = [
        [1 / rate_of(row) for row in rows_of(measured, storage, name)] for name in (base, way)
    ]
    return compare(gather(*seconds))


def record_of(measured: Sequence[Mapping[str, Any]]) -> Record:
    """Judge what was measured."""
    found = {name: against(measured, name, ONE_BY_ONE, BLOCKS) for name in STORAGES}
    words = [
        f"{name} {cells(pair)[0]} [{pair.interval[0]:.2f}-{pair.interval[1]:.2f}]"
        for name, pair in found.items()
    ]
    return Record(
        theme=THEME,
        claim=f"on throttled storage a packed store in block order is read at least {LEAST_RATIO} "
        "times as fast as at random, whole interval",
        holds=all(pair.interval[0] >= LEAST_RATIO for pair in found.values()),
        finding=", ".join(words),
        table=table(measured),
        raw={
            "storages": {name: asdict(speed) for name, speed in STORAGES.items()},
            "measured": list(measured),
        },
        notes=[
            *(
                f"{name}: {speed.seek_ms:g} ms for each request that does not go on where the "
                f"last one of its file ended, {speed.at_once} at once; {speed.mb_per_s:g} MB/s for "
                "all together."
                for name, speed in STORAGES.items()
            ),
            "Simulated speeds under real reads: a FUSE file system in Python lets every request "
            "wait; the kernel's page cache, page faults and read-ahead are real. Opening a file "
            "costs nothing, which favours loose files.",
            f"At random {DRAWN} photographs are read, in block order and after the warm-up a whole "
            f"epoch; the warm-up's own time is in it. A training takes {STEP_S:g} s a step.",
        ],
    )


def table(measured: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the record's table: rates first, then comparisons."""
    rows: list[tuple[str, ...]] = [("", "median", "least-most or 95 % interval", "n")]
    for storage in STORAGES:
        for way in WAYS:
            mine = rows_of(measured, storage, way)
            rates = [rate_of(row) for row in mine]
            rows.append((f"{storage}, MB/s: {way}", *spread(rates), str(len(rates))))
        for way in (FILES, ONE_BY_ONE, BATCHES, AHEAD, BLOCKS):
            mine = rows_of(measured, storage, way)
            asked = statistics.median(row["sample_bytes"] / row["requests"] for row in mine)
            rows.append(
                (f"{storage}, KB of samples a request: {way}", f"{asked / 1e3:.0f}", "", "")
            )
        for base, way in PAIRS:
            pair = against(measured, storage, base, way)
            rows.append((f"{storage}: {way} against {base}", *cells(pair)))
    return rows
