"""Packing: its rate, what kills do to it, and what cold reads gain from blocks.

The cold reads are real ones: files are flushed and dropped from the page cache with
`posix_fadvise`, and how much of them stayed in memory is looked at. The host of a virtual machine
may still have them; the record says so.
"""

import hashlib
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench import Bench, Record, TrialFailedError, make_photographs
from benchmarks.programs import ran
from flatout.data.format import read_header
from flatout.data.packed_store import PackedStore, evict, resident_share
from flatout.data.sampler import BlockSampler, OrderOptions, permutation
from flatout.data.staging import DRAFT
from flatout.records.units import format_rate, format_ratio

THEME = "pack"
PHOTOGRAPHS = 2000
REPEATS = 6
"""How often the packed photographs come again, so that an epoch has several windows."""
ROUNDS = 5
KILLS = 50
LEAST_RATE = 1500.0
LEAST_RATIO = 2.5
MAX_RESIDENT = 0.05
"""Share of a file that may stay in memory for its reads to count as cold."""
PACK = """
import json, sys, time
from pathlib import Path
from flatout.data.writer import PackOptions
from flatout.workflow.pack import pack
from flatout.data.format import Encoding
source, folder, workers, shard_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
encoding = Encoding(kind=sys.argv[5], short_side=int(sys.argv[6]))
options = PackOptions(workers=workers, shard_bytes=shard_bytes, encoding=encoding)
wall, cpu = time.perf_counter(), time.process_time()
def tell(progress):
    if progress.event:
        print("begun", flush=True)
packed = pack(source, Path(folder), options, tell)
spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
print(json.dumps(spent | {"samples": packed.header.samples}))
"""
"""One pack in a process of its own; it says when it begins to write."""
KILLED_REPEATS = 3
"""How often the photographs come in the pack that is killed."""
KILLED_SIDE = 256
"""It is one of pixels, which takes its time: nearly all of the kills should fall into one pack."""
SMALL_SHARD = 4_000_000
"""File shards of the pack that is killed: about fifteen pictures each."""
WORK_SHARE = 0.6
"""Of a whole pack's work, for all kills together: what a kill throws away takes the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """One way of reading: its name, the files to drop before, and what reads them."""

    name: str
    paths: Sequence[Path]
    read: Callable[[int], int]
    """Reads everything in the order of a round; returns the bytes."""


def run(bench: Bench) -> Record:
    """Make the photographs, pack them, kill packs, read cold."""
    photographs = make_photographs(bench.work / "photographs", PHOTOGRAPHS)
    bench.say("  packing, one worker")
    packs = [pack_once(photographs, bench.work / f"packed-{n}") for n in range(ROUNDS)]
    rates = [row["samples"] / row["wall_s"] for row in packs]
    bench.say(f"  {format_rate(statistics.median(rates))} photographs a second and core")
    kills = kill_often(photographs, bench.work / "killed", bench.say, repeats=KILLED_REPEATS)
    cold = read_cold(photographs, bench.work, bench.say)
    ratios = against(cold, "files, random order", "packed, block order")
    rate, ratio = statistics.median(rates), statistics.median(ratios)
    return Record(
        theme=THEME,
        claim=f"at least {LEAST_RATE:.0f} photographs a second and core; the same bytes after "
        f"{KILLS} kills; cold reads at least {LEAST_RATIO} times as fast as of files",
        holds=rate >= LEAST_RATE and kills["is_same"] and ratio >= LEAST_RATIO,
        finding=f"{format_rate(rate)} photographs/s, {kills['kills']} kills in {kills['finished']} "
        f"pack(s), {kills['inside']} while a file shard was written, {format_ratio(ratio)}",
        table=rows(packs, kills, cold),
        raw={"packs": packs, "kills": kills, "cold": cold},
        notes=[
            "Cold reads: flushed and dropped from this system's page cache, nothing of a storage's "
            "or a host's own cache; no network storage was measured.",
            "Killed are packs of pixels, at a random moment after each start began to write.",
            "Each packed epoch has the photographs six times; rates are bytes per second.",
        ],
    )


def pack_once(source: Path, folder: Path, *, workers: int = 1) -> dict[str, Any]:
    """Pack in a fresh process; return its times."""
    done = ran(command_of(source, folder, workers, 64 * 2**20))
    if done.returncode != 0:
        raise TrialFailedError(f"pack: {done.stderr.strip()[-300:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def command_of(
    source: Path, folder: Path, workers: int, shard_bytes: int, short_side: int = 0
) -> list[str]:
    """Return the command line of one pack: of the original bytes, or of pixels of that side."""
    kind = "raw" if short_side else "original"
    numbers = [str(workers), str(shard_bytes), kind, str(short_side)]
    return [sys.executable, "-c", PACK, str(source), str(folder), *numbers]


def kill_often(
    source: Path, work: Path, say: Callable[[str], None], kills: int = KILLS, repeats: int = 1
) -> dict[str, Any]:
    """Kill a pack again and again while it writes; compare what it ends with.

    Should it be finished before it was killed often enough, another one is begun.
    """
    drawn = random.Random(0)
    table = repeated(source, repeats, "killed.csv")
    whole_s = pack_whole(table, work / "whole")
    expected = contents(work / "whole")
    span_s = 2 * WORK_SHARE * whole_s / kills
    finished, is_same, done = 0, True, list[dict[str, Any]]()
    while len(done) < kills:
        folder = work / f"killed-{finished}"
        kill = killed(command_of_killed(table, folder), folder, drawn.uniform(0.0, span_s))
        if kill is not None:
            done.append({"pack": finished, **kill})
            continue
        is_same &= contents(folder) == expected
        finished += 1
        shutil.rmtree(folder)
    pack_whole(table, work / f"killed-{finished}")
    is_same &= contents(work / f"killed-{finished}") == expected
    inside = sum(kill["drafts"] > 0 for kill in done)
    say(f"  {kills} kills, {inside} inside a file shard, {finished + 1} packs: {is_same}")
    facts = {"kills": kills, "inside": inside, "finished": finished + 1, "is_same": is_same}
    return {**facts, "whole_s": whole_s, "span_s": span_s, "each": done}


def command_of_killed(source: Path, folder: Path) -> list[str]:
    """Return the command line of the pack that is killed."""
    return command_of(source, folder, 2, SMALL_SHARD, KILLED_SIDE)


def pack_whole(source: Path, folder: Path) -> float:
    """Let such a pack end, or go on to its end; return the seconds from its first write on."""
    with begun(command_of_killed(source, folder)) as process:
        started = time.perf_counter()
        if process.wait() != 0:
            raise TrialFailedError(f"a pack ended with code {process.returncode}")
        return time.perf_counter() - started


@contextmanager
def begun(command: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    """Start a pack, and go on when it begins to write, or has ended."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
        if process.stdout is not None:
            process.stdout.readline()
        yield process


def killed(command: Sequence[str], folder: Path, after_s: float) -> dict[str, Any] | None:
    """Kill a pack some time after it began to write; return what lay there then.

    None if it was finished before.
    """
    before = drafts(folder)
    with begun(command) as process:
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            whole = len(list(folder.glob("shard-*.bin")))
            return {"after_s": after_s, "drafts": len(drafts(folder) - before), "shards": whole}
        if process.returncode != 0:
            raise TrialFailedError(f"a resumed pack ended with code {process.returncode}")
    return None


def drafts(folder: Path) -> set[str]:
    """Return the file shards that were not written to their end: each has its writer's number."""
    return {path.name for path in folder.glob(f"shard-*{DRAFT}*")}


def repeated(photographs: Path, repeats: int, name: str) -> Path:
    """Write a table that has each photograph several times."""
    table = photographs / name
    files = sorted(path for path in photographs.glob("*/*") if path.is_file())
    lines = [str(path.relative_to(photographs)) for path in files] * repeats
    table.write_text("path\n" + "\n".join(lines) + "\n")
    return table


def contents(folder: Path) -> dict[str, str]:
    """Return a digest of every file of a store."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def read_cold(photographs: Path, work: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Read files and store cold, in turns; return bytes per second of each round."""
    files = sorted(photographs.rglob("*.jpg"))
    pack_once(repeated(photographs, REPEATS, "again.csv"), work / "again")
    folder = work / "again"
    shards = [folder / shard.name for shard in read_header(folder).shards]
    ways = (
        Reads(name="files, random order", paths=files, read=lambda epoch: read_files(files, epoch)),
        Reads(
            name="packed, random order",
            paths=shards,
            read=lambda epoch: read_store(folder, random_order, epoch),
        ),
        Reads(
            name="packed, block order",
            paths=shards,
            read=lambda epoch: read_store(folder, block_order, epoch),
        ),
    )
    measured = []
    for number in range(ROUNDS):
        for way in ways if number % 2 == 0 else ways[::-1]:
            row = {"way": way.name, "round": number, **timed(way, number)}
            measured.append(row)
            say(f"  {way.name}: {row['bytes'] / row['wall_s'] / 1e6:.0f} MB/s cold")
    return measured


def timed(way: Reads, number: int) -> dict[str, Any]:
    """Return the time of one round of cold reads."""
    for path in way.paths:
        evict(path)
    resident = resident_share(way.paths)
    if resident is None or resident > MAX_RESIDENT:
        raise TrialFailedError(f"{way.name}: {resident} of the files stayed in memory; not cold")
    started = time.perf_counter()
    count = way.read(number)
    return {"wall_s": time.perf_counter() - started, "bytes": count, "resident_share": resident}


def read_files(files: Sequence[Path], epoch: int) -> int:
    """Read whole files in random order."""
    order = permutation(len(files), seed=0, epoch=epoch)
    return sum(len(files[place].read_bytes()) for place in order)


def random_order(store: PackedStore, epoch: int) -> Iterable[int]:
    """Return an epoch in random order."""
    return map(int, permutation(len(store), seed=0, epoch=epoch))


def block_order(store: PackedStore, epoch: int) -> Iterable[int]:
    """Return an epoch in block order, with the kernel reading ahead."""
    sampler = BlockSampler(store, OrderOptions(block=16), is_reordered=False)
    sampler.set_epoch(epoch)
    return sampler


def read_store(folder: Path, order: Callable[[PackedStore, int], Iterable[int]], epoch: int) -> int:
    """Copy records out of the store in an order; it is opened again, as mapped pages stay."""
    store = PackedStore(folder)
    return sum(len(bytes(store.record(place))) for place in order(store, epoch))


def rates_of(cold: Sequence[dict[str, Any]], way: str) -> list[float]:
    """Return megabytes per second of each round, in the order of the rounds."""
    mine = sorted((row for row in cold if row["way"] == way), key=lambda row: int(row["round"]))
    return [row["bytes"] / row["wall_s"] / 1e6 for row in mine]


def against(cold: Sequence[dict[str, Any]], base: str, way: str) -> list[float]:
    """Return how many times faster a way is, round by round."""
    pairs = zip(rates_of(cold, base), rates_of(cold, way), strict=True)
    return [ours / theirs for theirs, ours in pairs]


def rows(
    packs: Sequence[dict[str, Any]], kills: dict[str, Any], cold: Sequence[dict[str, Any]]
) -> list[tuple[str, ...]]:
    """Return the record's table."""
    wall = [row["samples"] / row["wall_s"] for row in packs]
    cpu = [row["samples"] / row["cpu_s"] for row in packs]
    table: list[tuple[str, ...]] = [
        ("", "median", "least-most", "n"),
        ("packed a second, one worker", *spread(wall), str(len(wall))),
        ("packed a CPU second", *spread(cpu), str(len(cpu))),
        (
            f"a pack of {kills['whole_s']:.0f} s ended by kill -9, then finished",
            "identical" if kills["is_same"] else "DIFFERENT",
            f"{kills['finished']} packs",
            str(kills["kills"]),
        ),
        ("kills while a file shard was being written", "", "", str(kills["inside"])),
    ]
    for way in dict.fromkeys(row["way"] for row in cold):
        found = rates_of(cold, way)
        table.append((f"cold MB/s: {way}", *spread(found), str(len(found))))
    for base in ("files, random order", "packed, random order"):
        found = against(cold, base, "packed, block order")
        ratio = format_ratio(statistics.median(found))
        table.append((f"block order against {base}", ratio, spread(found)[1], str(len(found))))
    return table


def spread(values: Sequence[float]) -> tuple[str, str]:
    """Return the median and the range."""
    low, high = (format_rate(float(value)) for value in np.quantile(values, [0, 1]))
    return format_rate(statistics.median(values)), f"{low}-{high}"
