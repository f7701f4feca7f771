"""The same job by other projects' loaders, in turns: who feeds a training fastest on these cores.

Every repeat is a fresh process, the order is turned round after each round, and what is compared
is the number of images per second of processor time as well as of wall time. A loader whose
library is not installed is left out and named; see `benchmarks/peers/requirements.txt`.

The rows are classes of their own: photographs as JPEG files, photographs as pixels of short side
256, and pixels of 256 x 256 kept in memory, of which windows are cut instead of resized crops. All
deliver normalised float32 in the process that would train; rows called `bytes` deliver uint8, and
leave the normalising to the step, where it is not counted.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Record, cells, make_photographs
from benchmarks.peers.loaders import CEILINGS, PEERS
from benchmarks.peers.ours import (
    AS_BYTES,
    KEPT,
    KEPT_BYTES,
    OURS,
    PACKED_BYTES,
    PACKED_JPEG,
    PACKED_RAW,
)
from benchmarks.programs import ran
from flatout.records.ablation import Comparison
from flatout.records.statistics import compare, gather

THEME = "loader_peers"
ROOT = Path(__file__).parents[2]
PHOTOGRAPHS = 2000
ROUNDS = 4
SECONDS = 2.0
BUDGET_S = 450.0
"""No further round is begun that would end later; two are always run."""
LIMIT_S = 180.0
CLASSES = ("JPEG", "raw")
CLASSIC = "torch DataLoader"
RAW = ("FFCV raw 256", PACKED_RAW)
"""The class of loaders that start from pixels; the others start from JPEG files."""
APART = (*AS_BYTES, KEPT, *CEILINGS)
"""Rows that do less than the whole job, and stand for no class."""
RAW_RATIO, KEPT_RATIO, MEMORY_RATIO, CEILING_SHARE, FIRST_S = 10.0, 50.0, 1.2, 0.85, 0.5
"""What is aimed at: times the classic loader's rate, its memory, a share of decoding alone, and the
time to the first batch."""


def run(bench: Bench, rounds: int = ROUNDS, photographs: int = PHOTOGRAPHS) -> Record:
    """Measure every loader that is installed."""
    folder, formats = bench.work / "photographs", bench.work / "formats"
    prepare(bench, folder, formats, photographs)
    measured: dict[str, list[Mapping[str, Any]]] = {}
    missing: dict[str, str] = {}
    names = [*PEERS, *OURS, *CEILINGS]
    began = time.monotonic()
    for number in range(rounds):
        if number >= 2 and (time.monotonic() - began) * (number + 1) / number > BUDGET_S:
            bench.say(f"  no time for round {number + 1}")
            break
        for name in names if number % 2 == 0 else names[::-1]:
            if name in missing:
                continue
            found = measure(name, folder, formats)
            if isinstance(found, str):
                missing[name] = found
                measured.pop(name, None)
            else:
                measured.setdefault(name, []).append(found)
        bench.say(f"  round {number + 1} of {rounds}")
    return record_of(measured, missing)


def prepare(bench: Bench, folder: Path, formats: Path, photographs: int) -> None:
    """Make the photographs and every format."""
    bench.say(f"  {photographs} photographs")
    make_photographs(folder, photographs, "--format", "jpeg")
    subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.convert", str(folder), str(formats)],
        check=True,
        cwd=ROOT,
        capture_output=True,
    )
    pack = [sys.executable, "-m", "flatout", "pack"]
    raw = ["--encode", "raw", "--short-side", "256"]
    for name, options in (("packed", []), ("packed256", raw)):
        subprocess.run(
            [*pack, *options, str(folder), str(formats / name)], check=True, capture_output=True
        )


def measure(name: str, folder: Path, formats: Path) -> Mapping[str, Any] | str:
    """Return what one fresh process measured, or why it did not."""
    command = [sys.executable, "-m", "benchmarks.peers.measure", name, str(folder), str(formats)]
    try:
        done = ran([*command, "--seconds", str(SECONDS)], cwd=ROOT, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no result within {LIMIT_S:.0f} s"
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode or not last:
        said = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return said[0][:200]
    found: Mapping[str, Any] = json.loads(last[0])
    return found


def record_of(
    measured: Mapping[str, Sequence[Mapping[str, Any]]], missing: Mapping[str, str]
) -> Record:
    """Return the record; the claim is about each class of loaders on its own."""
    aims = [(leads(measured, is_raw=kind == "raw"), f"ahead from {kind}") for kind in CLASSES]
    aims += targets(measured)
    whole = [name for name in measured if name in OURS and name not in APART]
    best = max(whole, key=lambda n: wall_rate(measured[n]), default="")
    return Record(
        theme=THEME,
        claim=(
            "from JPEG files and from pixels alike, no other loader is faster; packed pixels come "
            f"{RAW_RATIO:.0f} times, pixels kept in memory {KEPT_RATIO:.0f} times as fast as the "
            "classic loader's"
        ),
        holds=all(is_met for is_met, _ in aims),
        finding=(
            f"{best} {wall_rate(measured[best]):.0f} images/s" if best else "nothing was measured"
        ),
        table=[
            (
                *("loader", "images/s, wall", "images per CPU second", "times the classic"),
                *("95 % interval", "n", "first batch", "memory", "mapped files"),
            ),
            *(row(name, measured) for name in measured),
        ],
        raw={"measured": measured, "missing": missing},
        notes=[
            *(f"{'met' if is_met else 'missed'}: {what}" for is_met, what in aims),
            *(f"{name} was left out: {why}" for name, why in missing.items()),
            "Rows called bytes hand out uint8; normalising them in the step is not counted. Kept "
            "pixels are windows of 224 cut from 256 x 256 in memory; nothing is resized. Memory is "
            "the proportional share of the whole process tree without the mapped pages of the data "
            "files, which stand apart.",
        ],
    )


def targets(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[bool, str]]:
    """Return for each aim whether it is met, with what was measured."""
    rates = {name: wall_rate(each) for name, each in measured.items()}
    ratios = (
        (PACKED_RAW, CLASSIC, RAW_RATIO),
        (PACKED_BYTES, CLASSIC, RAW_RATIO),
        (KEPT, CLASSIC, KEPT_RATIO),
        (KEPT_BYTES, CLASSIC, KEPT_RATIO),
        *((PACKED_JPEG, ceiling, CEILING_SHARE) for ceiling in CEILINGS),
    )
    found = [
        at_least(rates[name] / rates[other], aim, f"{name}, rate / {other}")
        for name, other, aim in ratios
        if name in rates and other in rates
    ]
    for name in (PACKED_JPEG, PACKED_RAW):
        if name in measured and CLASSIC in measured:
            share = own_bytes(measured[name]) / own_bytes(measured[CLASSIC])
            found.append(at_most(middle(measured[name], "first_s"), FIRST_S, f"{name}, first s"))
            found.append(at_most(share, MEMORY_RATIO, f"{name}, memory / {CLASSIC}"))
    return found


def at_least(value: float, aim: float, what: str) -> tuple[bool, str]:
    """Return whether a value is as large as aimed at, and the line that says so."""
    return value >= aim, f"{what}: {value:.2f}, aim {aim:g} or more"


def at_most(value: float, aim: float, what: str) -> tuple[bool, str]:
    """Return whether a value is as small as aimed at, and the line that says so."""
    return value <= aim, f"{what}: {value:.2f}, aim {aim:g} or less"


def middle(found: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the median of what the repeats have under a name."""
    return statistics.median(float(one.get(name, 0)) for one in found)


def own_bytes(found: Sequence[Mapping[str, Any]]) -> float:
    """Return the median of the memory without mapped data files."""
    return statistics.median(one["pss_bytes"] - one.get("mapped_bytes", 0) for one in found)


def leads(measured: Mapping[str, Sequence[Mapping[str, Any]]], *, is_raw: bool) -> bool:
    """Return whether one of ours is ahead of all others of a class, by the median of wall time."""
    whole = {name: found for name, found in measured.items() if name not in APART}
    rates = {n: wall_rate(found) for n, found in whole.items() if (n in RAW) == is_raw}
    ours = [rate for name, rate in rates.items() if name in OURS]
    others = [rate for name, rate in rates.items() if name not in OURS]
    return bool(ours) and max(ours) >= max(others, default=0.0)


def wall_rate(found: Sequence[Mapping[str, Any]]) -> float:
    """Return the median of images per second."""
    return statistics.median(one["images"] / one["wall_s"] for one in found)


def row(name: str, measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, ...]:
    """Return a loader's row of the table."""
    found = measured[name]
    per_cpu = statistics.median(one["images"] / one["cpu_s"] for one in found)
    mapped = middle(found, "mapped_bytes") / 2**20
    pair = against_classic(found, measured.get(CLASSIC, ()))
    ratio = cells(pair) if pair else ("", "", "")
    return (
        *(name, f"{wall_rate(found):.0f}", f"{per_cpu:.0f}"),
        *(*ratio, f"{middle(found, 'first_s'):.1f} s", f"{own_bytes(found) / 2**20:.0f} MiB"),
        f"{mapped:.0f} MiB",
    )


def against_classic(
    found: Sequence[Mapping[str, Any]], classic: Sequence[Mapping[str, Any]]
) -> Comparison | None:
    """Return how many times as fast as the classic loader, from the rounds both ran in."""
    pairs = list(zip(classic, found, strict=False))
    if len(pairs) < 2:
        return None
    times = [[one["wall_s"] / one["images"] for one in side] for side in zip(*pairs, strict=True)]
    return compare(gather(*times))
