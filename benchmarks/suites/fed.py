"""End to end: the starved scenario under tune's final recipe, its free data, and its cores.

The scenario is tuned as a user would, all techniques up to `precision`. Then these run in turns,
each in a process of its own: the unchanged script, the recipe, the recipe with batches that were
made before, and that once more with all cores making samples alongside it, which tells what the
cores can make and train on at most. In turns, because the machine is faster at one time than at
another: the recipe of a turn is compared with the limits of that turn. The lower one of the two
limits binds.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.bench import Arm, Bench, Record, cells, comparison, interleave, open_lab
from flatout.records.ablation import Comparison, Feeding
from flatout.records.journey import Pipeline
from flatout.records.messages import ENGLISH, messages
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.statistics import compare, gather
from flatout.records.units import format_interval, format_ms, format_rate
from flatout.reporting.tuning.verdict import fed
from flatout.tuning.feeding import Costs, feeding_of, find_costs, find_pipeline, free_ms_of
from flatout.tuning.passes.ceilings import replay_probe
from flatout.tuning.trial_runner import TrialRunner
from flatout.workflow.demo import make_job
from flatout.workflow.tune import TuneOptions, tune

THEME = "fed"
ROUNDS = 8
"""In four the interval of the share was as wide as a tenth of it."""
IMAGES = 2400
"""135 steps an epoch. In the demo's 22 the cores cannot all be busy: while an epoch begins the
training waits for its first batch, and while it ends the workers have nothing left to make."""
STEPS = 130
"""Of the recipe and of each limit, within one epoch: the 17 of a trial are its first second."""
LEAST_SHARE, MOST_SHARE = 0.95, 1.1
"""Within five in a hundred of the lower limit. What goes beyond it by more than the two
measurements differ shows that the limit was not understood, and holds nothing."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn gave, each in milliseconds a step but for the samples' costs."""

    step_ms: float
    free_ms: float
    costs: Costs
    """Of a step and of a sample."""
    pipeline: Pipeline

    def feeding(self, final: Profile) -> Feeding:
        """Return how far the recipe was from its limits in this turn."""
        # The arm's steps hold their part of the epochs' start already.
        step_ms = replace(final.step_ms, median=self.step_ms)
        measured = replace(final, step_ms=step_ms, epoch_start_ms=0.0)
        return feeding_of(measured, self.free_ms, self.pipeline, self.costs)


@dataclass(slots=True)
class Limits:
    """What the recipe could reach: with batches that were made before, and by its cores."""

    lab: TrialRunner
    recipe: Recipe
    final: Profile
    turns: list[Turn] = field(default_factory=list)

    def run(self) -> None:
        """Look once; what drawing a replayed batch takes is no part of free data."""
        plain = self._look("epoch", {})
        free = self._look("free", replay_probe(self.final, "host"))
        costs = self.lab.drive(find_costs(self.lab.history, self.recipe, self.final, STEPS))
        pipeline = self.lab.drive(
            find_pipeline(self.lab.history, self.recipe, self.final, all_cores=True)
        )
        if plain is not None and free is not None and pipeline is not None:
            self.turns.append(Turn(plain.step_ms.median, free_ms_of(free), costs, pipeline))

    def _look(self, what: str, probes: Mapping[str, Any]) -> Profile | None:
        return self.lab.drive(self.lab.history.look(what, self.recipe, probes, STEPS)).profile

    def feeding(self) -> Feeding:
        """Return the rates, each by what is in the middle of its turns."""
        if not self.turns:
            raise SystemExit("the samples of the recipe could not be looked at")
        by_cost = sorted((turn.pipeline for turn in self.turns), key=lambda x: x.cpu_ms)
        made_ms = [x.costs.made_ms for x in self.turns if x.costs.made_ms is not None]
        costs = Costs(
            trained_ms=statistics.median(turn.costs.trained_ms for turn in self.turns),
            made_ms=statistics.median(made_ms) if made_ms else None,
        )
        middle = Turn(
            statistics.median(turn.step_ms for turn in self.turns),
            statistics.median(turn.free_ms for turn in self.turns),
            costs,
            by_cost[len(by_cost) // 2],
        )
        return middle.feeding(self.final)

    def each(self) -> list[Feeding]:
        """Return the rates of each turn."""
        return [turn.feeding(self.final) for turn in self.turns]

    def share(self) -> Comparison:
        """Return the rate over its limit, turn by turn, with its interval."""
        found = self.each()
        return compare(
            gather(
                [1 / x.measured_limit_per_s for x in found], [1 / x.samples_per_s for x in found]
            )
        )


def run(bench: Bench, rounds: int = ROUNDS) -> Record:
    """Tune the scenario, then run the three in turns."""
    workload = make_job(bench.work, IMAGES)
    ablation = tune(
        workload, TuneOptions(out=bench.work / "tune", budget_s=bench.budget_s), bench.tell
    )
    lab = open_lab(bench, workload, THEME)
    plain = Arm(name="unchanged", lab=lab, recipe=replace(ablation.recipe, choices=()))
    ours = Arm(name="recipe", lab=lab, recipe=ablation.recipe)
    final = ablation.final or ablation.baseline
    limits = Limits(lab, ablation.recipe, final)
    for number in range(rounds):
        interleave([plain, ours] if number % 2 == 0 else [ours, plain], 1)
        limits.run()
        bench.say(f"  round {number + 1} of {rounds}")
    return record_of(ablation.recipe, (plain, ours), limits)


def record_of(recipe: Recipe, arms: Sequence[Arm], limits: Limits) -> Record:
    """Return the record: the rates, the limits and which one binds."""
    plain, ours = arms
    found, share = limits.feeding(), limits.share()
    apart_ms = statistics.median(turn.pipeline.cpu_ms for turn in limits.turns)
    return Record(
        theme=THEME,
        claim=f"the tuned script is within {1 - LEAST_SHARE:.0%} of the lower one of its limits",
        holds=LEAST_SHARE <= share.ratio <= MOST_SHARE,
        finding=f"{100 * share.ratio:.1f} % of its limit ({format_interval(*share.interval)}, "
        f"n={share.n}), turn by turn; by the middle of each: "
        f"{messages(ENGLISH).text(fed(found))}",
        table=[
            ("", "step", "samples/s", "ratio", "95 % interval", "n"),
            ("unchanged", format_ms(plain.median_ms), "", "1.00x", "", str(len(plain.times_s))),
            (
                recipe.label,
                format_ms(ours.median_ms),
                format_rate(found.samples_per_s),
                *cells(comparison(plain, ours)),
            ),
            *limit_rows(found),
        ],
        raw={
            "times_s": {arm.name: arm.times_s for arm in arms},
            "free_ms": [turn.free_ms for turn in limits.turns],
            "step_ms": [turn.step_ms for turn in limits.turns],
            "trained_ms": [turn.costs.trained_ms for turn in limits.turns],
            "made_ms": [turn.costs.made_ms for turn in limits.turns],
            "made_apart_ms": [turn.pipeline.cpu_ms for turn in limits.turns],
            "shares": [x.samples_per_s / x.measured_limit_per_s for x in limits.each()],
            "feeding": found.to_json(),
        },
        recipe=recipe,
        notes=[
            f"A sample takes {found.made_ms:.2f} ms of a core to make under the recipe, and "
            f"{found.trained_ms:.2f} ms to train on, both at a time on full cores; to make where "
            f"nothing trains meanwhile, {apart_ms:.2f} ms.",
        ],
    )


def limit_rows(found: Feeding) -> list[tuple[str, ...]]:
    """Return a row for each limit; the one that binds says so."""
    rates: Mapping[str, float | None] = {
        "free_data": found.free_data_per_s,
        "cores": found.cores_per_s,
        "decoding alone": found.decode_per_s,
    }
    words = {"free_data": "limit: free data", "cores": "limit: what the cores can make"}
    return [
        (
            words.get(name, "were making only decoding") + (", binds" * (name == found.binds)),
            "",
            format_rate(rate),
            "",
            "",
            "",
        )
        for name, rate in rates.items()
        if rate is not None
    ]
