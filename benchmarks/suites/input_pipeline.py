"""The input pipeline's techniques on an ordinary script: images per second of two workers.

Every repeat is a fresh process of `flatout run` with one recipe over the same, unmodified script;
the order is turned round after each round. Two things are compared: wall time, which is what a
training waits for, and processor time of the whole process tree, which other work on the machine
disturbs less. "As bytes" ends where a device takes over: what travels as bytes is scaled there.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Record, TrialFailedError, cells, make_photographs
from benchmarks.programs import python
from flatout.records.ablation import Comparison
from flatout.records.recipe import Choice, Recipe
from flatout.records.statistics import compare, gather
from flatout.workflow.recipe_files import write_recipe

THEME = "input_pipeline"
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "scripts" / "feed.py"
PHOTOGRAPHS = 1000
ROUNDS = 6
LIMIT_S = 180.0
LEAST_WITH_PILLOW, LEAST_WITH_DECODER = 1.6, 2.0
MOST_FIRST_S, MOST_MEMORY = 0.5, 1.2
"""The aims for the first batch, and for memory against the classic loader's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """One way to feed the same loop."""

    name: str
    levers: tuple[str, ...] = ()
    is_as_bytes: bool = False

    @property
    def recipe(self) -> Recipe:
        """The techniques with their settings."""
        return Recipe(choices=tuple(Choice(technique=name) for name in self.levers))


AS_BYTES = ", as bytes"
CLASSIC = Feed(name="classic: two workers, Pillow, float32")
PILLOW = Feed(
    name="fast_resize + device_preprocess" + AS_BYTES,
    levers=("fast_resize", "device_preprocess"),
    is_as_bytes=True,
)
DECODER = Feed(
    name="region_decode + fast_resize + device_preprocess" + AS_BYTES,
    levers=("region_decode", "fast_resize", "device_preprocess"),
    is_as_bytes=True,
)
FEEDS = (
    CLASSIC,
    Feed(name="fast_decode", levers=("fast_decode",)),
    Feed(name="region_decode", levers=("region_decode",)),
    Feed(name="fast_resize", levers=("fast_resize",)),
    Feed(name="device_preprocess", levers=("device_preprocess",)),
    Feed(name="fast_resize + device_preprocess", levers=("fast_resize", "device_preprocess")),
    Feed(
        name="fast_decode + fast_resize + device_preprocess",
        levers=("fast_decode", "fast_resize", "device_preprocess"),
    ),
    Feed(
        name="region_decode + fast_resize + device_preprocess",
        levers=("region_decode", "fast_resize", "device_preprocess"),
    ),
    PILLOW,
    DECODER,
)
MARKS = {
    "device_preprocess": "PackingCollate",
    "fast_decode": "fast_decode",
    "fast_resize": "fast_resize",
    "region_decode": "region_decode",
}
"""What a technique leaves on the loader; a technique that was refused would be measured as nothing.
"""


def run(bench: Bench, rounds: int = ROUNDS, photographs: int = PHOTOGRAPHS) -> Record:
    """Make the photographs and feed the loop in every way, in turns."""
    folder = make_photographs(bench.work / "photographs", photographs)
    measured: dict[str, list[Mapping[str, Any]]] = {feed.name: [] for feed in FEEDS}
    for number in range(rounds):
        for feed in FEEDS if number % 2 == 0 else FEEDS[::-1]:
            measured[feed.name].append(measure(bench, feed, folder))
        bench.say(f"  round {number + 1} of {rounds}")
    return record_of(measured)


def measure(bench: Bench, feed: Feed, folder: Path, *options: str) -> Mapping[str, Any]:
    """Feed the loop once, in a fresh process."""
    recipe = bench.work / "recipe.toml"
    write_recipe(feed.recipe, recipe)
    script = [str(SCRIPT), "--data", str(folder), *options]
    script += ["--as-bytes"] if feed.is_as_bytes else []
    under = ["-m", "flatout", "run", "--with", str(recipe)] if feed.levers else []
    done = python([*under, *script], timeout=LIMIT_S, cwd=bench.work)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise TrialFailedError(f"{feed.name}: {(done.stderr or done.stdout)[-500:]}")
    found: Mapping[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    missed = [lever for lever in feed.levers if MARKS[lever] not in found["hooks"]]
    if missed:
        raise TrialFailedError(f"{feed.name}: {', '.join(missed)} was not applied")
    return found


def record_of(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> Record:
    """Return the record of all rounds."""
    pillow = gain(measured, PILLOW.name)
    fast = gain(measured, DECODER.name)
    return Record(
        theme=THEME,
        claim=(
            f"on an unmodified script at least {LEAST_WITH_PILLOW:.1f}x the images of the classic "
            f"loader with Pillow, {LEAST_WITH_DECODER:.1f}x with a faster decoder, as bytes"
        ),
        holds=pillow.ratio >= LEAST_WITH_PILLOW and fast.ratio >= LEAST_WITH_DECODER,
        finding=f"{pillow.ratio:.2f}x with Pillow, {fast.ratio:.2f}x with a faster decoder",
        table=[
            (
                "",
                "images/s",
                "ratio",
                "95 % interval",
                "n",
                "CPU ms/image",
                "ratio of CPU time",
                "first batch",
                "memory",
            ),
            *(row(measured, name) for name in measured),
        ],
        raw={"measured": measured},
        notes=[
            "As bytes: what a device does (floats from bytes) is not done on the CPU and not "
            "counted; the other rows do all of it on the CPU and hand out the same float32 values, "
            "bit by bit.",
            "The first batch holds the proof on the script's own samples.",
            *aims(measured),
        ],
    )


def aims(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return what else the techniques should reach, met or missed, of the claimed feeds."""
    classic = middle(measured, CLASSIC.name, "pss_mb")
    lines = []
    for feed, least in ((PILLOW, LEAST_WITH_PILLOW), (DECODER, LEAST_WITH_DECODER)):
        as_floats = gain(measured, feed.name.removesuffix(AS_BYTES)).ratio
        first_s = middle(measured, feed.name, "first_s")
        memory = middle(measured, feed.name, "pss_mb") / classic
        lines.append(
            f"{feed.name}: {as_floats:.2f}x where the floats are made on the CPU, too (aim "
            f"{least:.1f}x, {met(as_floats >= least)}); the first batch after {first_s:.2f} s (aim "
            f"{MOST_FIRST_S} s, {met(first_s <= MOST_FIRST_S)}); {memory:.2f} of the classic's "
            f"memory (aim {MOST_MEMORY}, {met(memory <= MOST_MEMORY)})"
        )
    return lines


def met(is_met: bool) -> str:  # noqa: FBT001  a word for a truth
    """Return the word for an aim that was reached or not."""
    return "met" if is_met else "missed"


def middle(measured: Mapping[str, Sequence[Mapping[str, Any]]], name: str, what: str) -> float:
    """Return the median of one number of a feed."""
    return statistics.median(one[what] for one in measured[name])


def gain(measured: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> Comparison:
    """Return how many times as many images a feed delivers as the classic loader."""
    classic, other = (
        [1 / one["images_per_s"] for one in measured[each]] for each in (CLASSIC.name, name)
    )
    return compare(gather(classic, other))


def row(measured: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> tuple[str, ...]:
    """Return a feed's row of the table."""

    def median(key: str, of: str = name) -> float:
        return statistics.median(one[key] for one in measured[of])

    ratio = ("1.00x", "", str(len(measured[name])))
    if name != CLASSIC.name:
        ratio = cells(gain(measured, name))
    cpu = median("cpu_ms", CLASSIC.name) / median("cpu_ms")
    return (
        name,
        f"{median('images_per_s'):.0f}",
        *ratio,
        f"{median('cpu_ms'):.2f}",
        f"{cpu:.2f}x",
        f"{median('first_s'):.2f} s",
        f"{median('pss_mb'):.0f} MB",
    )
