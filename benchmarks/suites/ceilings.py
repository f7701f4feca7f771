"""Ceilings: the gain foreseen from replayed batches, against data that really are free.

Each round runs the script as it is and with ready batches from memory, side by side, and then the
ceilings' own passes, as `flatout measure` does. Freed memory is kept in the process throughout: by
default the allocator gives pages back and faults them in again, a quarter to a half of these short
steps, by chance twice as often in one process as in the next one.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import (
    LIMIT_S,
    Arm,
    Bench,
    Record,
    TrialFailedError,
    cells,
    comparison,
    interleave,
    open_lab,
)
from flatout.records.ablation import Comparison
from flatout.records.profile import Profile
from flatout.records.recipe import Choice, Recipe
from flatout.records.units import format_ratio
from flatout.tuning.passes import PassRunner
from flatout.tuning.passes.ceilings import with_ceilings

THEME = "ceilings"
SCRIPT = Path(__file__).parents[1] / "scripts" / "free_data.py"
SCENARIOS = {
    "sleep": "a disk that makes each sample wait",
    "decode": "decoding in the training process",
    "workers": "decoding in two workers",
}
KEEPS_PAGES = Recipe(choices=(Choice(technique="cpu_allocator", settings={"library": "glibc"}),))
ROUNDS = 8
MOST_OFF = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """One scenario: what was foreseen in each round, and what free data really gave."""

    scenario: str
    gains: Sequence[float]
    really: Comparison
    raw: Mapping[str, Any]

    @property
    def gain(self) -> float:
        """The foreseen gain, over the rounds."""
        return statistics.median(self.gains)

    @property
    def off(self) -> float:
        """How far the foreseen gain is from the real one, as a share of it."""
        return self.gain / self.really.ratio - 1


def run(bench: Bench, rounds: int = ROUNDS) -> Record:
    """Foresee and measure the gain of free data in three scenarios."""
    found = [foresee(bench, scenario, rounds) for scenario in SCENARIOS]
    return Record(
        theme=THEME,
        claim=f"the foreseen gain of free data is within {MOST_OFF:.0%} of the measured one",
        holds=holds(found),
        finding=", ".join(f"{each.scenario} {each.off:+.1%}" for each in found),
        table=[
            ("scenario", "foreseen", "really", "95 % interval", "n", "off"),
            *(row(each) for each in found),
        ],
        raw={each.scenario: each.raw for each in found},
    )


def holds(found: Sequence[Foreseen]) -> bool:
    """Return whether every scenario was foreseen closely enough."""
    return bool(found) and all(abs(each.off) <= MOST_OFF for each in found)


def row(foreseen: Foreseen) -> tuple[str, ...]:
    """Return a scenario's row of the table."""
    ratio, interval, n = cells(foreseen.really)
    name = f"{foreseen.scenario}: {SCENARIOS[foreseen.scenario]}"
    return name, format_ratio(foreseen.gain), ratio, interval, n, f"{foreseen.off:+.1%}"


def foresee(bench: Bench, scenario: str, rounds: int) -> Foreseen:
    """Run one scenario: in every round as it is, with free data, and the ceilings' passes."""
    plain_lab = open_lab(bench, bench.workload(SCRIPT, scenario, name="work"), scenario)
    plain = Arm(name="as it is", lab=plain_lab, recipe=KEEPS_PAGES)
    free_workload = bench.workload(SCRIPT, scenario, "--free", name="work")
    free_lab = open_lab(bench, free_workload, f"{scenario}-free")
    free = Arm(name="free", lab=free_lab, recipe=KEEPS_PAGES)
    gains: list[float] = []
    for number in range(rounds):
        arms = [plain, free]
        interleave(arms if number % 2 == 0 else arms[::-1], 1)
        gains.append(foreseen_gain(bench, scenario, plain.profiles[-1]))
        bench.say(
            f"  {scenario}, round {number + 1} of {rounds}: foreseen {format_ratio(gains[-1])}, "
            f"really {format_ratio(plain.times_s[-1] / free.times_s[-1])}"
        )
    return Foreseen(
        scenario=scenario,
        gains=gains,
        really=comparison(plain, free),
        raw={"foreseen": gains, "plain_s": plain.times_s, "free_s": free.times_s},
    )


def foreseen_gain(bench: Bench, scenario: str, profile: Profile) -> float:
    """Return the ceiling of free data that the passes measure."""
    runner = PassRunner(
        workload=bench.workload(SCRIPT, scenario, name="work"),
        recipe=KEEPS_PAGES,
        machine=bench.machine,
        limit_s=LIMIT_S,
    )
    seen = with_ceilings(profile, runner)
    if not seen.ceilings.is_measured:
        raise TrialFailedError(f"{scenario}: {'; '.join(seen.notes)}")
    return seen.ceilings.free_data
