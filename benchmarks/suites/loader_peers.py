"""The same job by other projects' loaders, in turns: who feeds a training fastest on these cores.

Every repeat is a fresh process, the order is turned round after each round, and what is compared
is the number of images per second of processor time as well as of wall time. A loader whose
library is not installed is left out and named; see `benchmarks/peers/requirements.txt`.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Record, cells
from benchmarks.peers.loaders import PEERS
from benchmarks.peers.ours import OURS
from flatout.core.ablation import Comparison
from flatout.core.stats import compare, gather
from flatout.workflow.demo import scenarios

THEME = "loader_peers"
ROOT = Path(__file__).parents[2]
PHOTOGRAPHS = 2000
ROUNDS = 4
SECONDS = 3.0
LIMIT_S = 180.0
CLASSIC = "torch DataLoader"
RAW = ("FFCV raw 256", "flatout, packed raw 256")
"""The class of loaders that start from pixels; the others start from JPEG files."""


def run(bench: Bench, rounds: int = ROUNDS, photographs: int = PHOTOGRAPHS) -> Record:
    """Measure every loader that is installed."""
    folder, formats = bench.work / "photographs", bench.work / "formats"
    prepare(bench, folder, formats, photographs)
    measured: dict[str, list[Mapping[str, Any]]] = {}
    missing: dict[str, str] = {}
    names = [*PEERS, *OURS]
    for number in range(rounds):
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
    maker = scenarios() / "photographs.py"
    bench.say(f"  {photographs} photographs")
    command = [sys.executable, str(maker), str(folder), "--count", str(photographs)]
    subprocess.run([*command, "--format", "jpeg"], check=True, capture_output=True)
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
        done = subprocess.run(
            [*command, "--seconds", str(SECONDS)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=LIMIT_S,
            check=False,
        )
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
    """Return the record; the claim is about each class of loaders by itself."""
    ahead = {kind: leads(measured, is_raw=kind == "raw") for kind in ("JPEG", "raw")}
    best = max((n for n in measured if n in OURS), key=lambda n: wall_rate(measured[n]), default="")
    return Record(
        theme=THEME,
        claim="from JPEG files and from pixels alike, no other loader is faster",
        holds=all(ahead.values()),
        finding=(
            f"{best} {wall_rate(measured[best]):.0f} images/s" if best else "nothing was measured"
        ),
        table=[
            (
                *("loader", "images/s, wall", "images per CPU second", "times the classic"),
                *("95 % interval", "n", "first batch", "memory"),
            ),
            *(row(name, measured) for name in measured),
        ],
        raw={"measured": measured, "missing": missing},
        repeat=f"python -m benchmarks.run {THEME}",
        notes=[f"{name} was left out: {why}" for name, why in missing.items()],
    )


def leads(measured: Mapping[str, Sequence[Mapping[str, Any]]], *, is_raw: bool) -> bool:
    """Tell whether one of ours is ahead of all others of a class, by the median of wall time."""
    rates = {n: wall_rate(found) for n, found in measured.items() if (n in RAW) == is_raw}
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
    first = statistics.median(one["first_s"] for one in found)
    memory = statistics.median(one["pss_bytes"] for one in found) / 2**20
    pair = against_classic(found, measured.get(CLASSIC, ()))
    ratio = cells(pair) if pair else ("", "", "")
    return (
        *(name, f"{wall_rate(found):.0f}", f"{per_cpu:.0f}"),
        *(*ratio, f"{first:.1f} s", f"{memory:.0f} MiB"),
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
