"""End to end: the starved scenario under tune's final recipe, its free data, and its cores.

The scenario is tuned as a user would, all levers up to `precision`. Then three things run in turns,
each in a process of its own: the unchanged script, the recipe, and the recipe with batches that
were made before. The CPU time of a sample by leg, looked at under the recipe, tells what the cores
can make at most; the lower one of the two limits binds.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.bench import Arm, Bench, Record, cells, comparison, interleave, open_lab
from flatout.core.feeding import Feeding
from flatout.core.profile import Profile
from flatout.core.recipe import Recipe
from flatout.core.units import format_ms, format_rate
from flatout.reporting.verdict import feeding_words
from flatout.workflow.demo import make_job
from flatout.workflow.feeding import feeding_of, find_pipeline, find_trained_ms, free_ms_of
from flatout.workflow.lab import Lab
from flatout.workflow.passes.ceilings import replay_probe
from flatout.workflow.tune import TuneOptions, tune

THEME = "fed"
ROUNDS = 4
IMAGES = 2400
"""135 steps an epoch. In the demo's 22 the cores cannot all be busy: while an epoch begins the
training waits for its first batch, and while it ends the workers have nothing left to make."""
LEAST_SHARE, MOST_SHARE = 0.95, 1.1
"""Within five in a hundred of the lower limit. What goes beyond it by more than the two
measurements differ shows that the limit was not understood, and holds nothing."""


@dataclass(slots=True)
class Free:
    """The recipe with batches that were made before."""

    lab: Lab
    recipe: Recipe
    final: Profile
    steps_ms: list[float] = field(default_factory=list)
    latest: Profile | None = None

    def run(self) -> None:
        """Run once; what drawing a replayed batch takes is no part of free data."""
        trial = self.lab.look("free data", self.recipe, replay_probe(self.final, "host"), None)
        if trial.profile is not None:
            self.steps_ms.append(free_ms_of(trial.profile))
            self.latest = trial.profile


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
    free = Free(lab, ablation.recipe, final)
    for number in range(rounds):
        interleave([plain, ours], 1)
        free.run()
        bench.say(f"  round {number + 1} of {rounds}")
    pipeline = find_pipeline(lab, ablation.recipe, final, all_cores=True)
    if pipeline is None or free.latest is None:
        raise SystemExit("the samples of the recipe could not be looked at")
    # The arm's steps hold their part of the epochs' start already.
    step_ms = replace(final.step_ms, median=ours.median_ms)
    measured = replace(final, step_ms=step_ms, epoch_start_ms=0.0)
    step_cpu_ms = find_trained_ms(lab, ablation.recipe, free.latest)
    found = feeding_of(measured, statistics.median(free.steps_ms), pipeline, step_cpu_ms)
    return record_of(ablation.recipe, found, (plain, ours), free.steps_ms)


def record_of(
    recipe: Recipe, found: Feeding, arms: Sequence[Arm], free_ms: Sequence[float]
) -> Record:
    """Return the record: the rates, the limits and which one binds."""
    plain, ours = arms
    return Record(
        theme=THEME,
        claim=f"the tuned script is within {1 - LEAST_SHARE:.0%} of the lower one of its limits",
        holds=LEAST_SHARE <= found.share <= MOST_SHARE,
        finding=feeding_words(found),
        table=[
            ("", "step", "samples/s", "ratio", "95 % interval", "n"),
            ("unchanged", format_ms(plain.median_ms), "", "1.00x", "", str(len(plain.times_s))),
            (
                recipe.label,
                format_ms(ours.median_ms),
                format_rate(found.samples_per_s),
                *cells(comparison(plain, ours)),
            ),
            *limits(found),
        ],
        raw={
            "times_s": {arm.name: arm.times_s for arm in arms},
            "free_ms": list(free_ms),
            "feeding": found.to_json(),
        },
        repeat=f"python -m benchmarks.run {THEME}",
        recipe=recipe,
        notes=[
            f"A sample takes {found.made_ms:.2f} ms of a core to make under the recipe, and "
            f"{found.trained_ms:.2f} ms to train on.",
        ],
    )


def limits(found: Feeding) -> list[tuple[str, ...]]:
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
