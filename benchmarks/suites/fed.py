"""End to end: the starved scenario under tune's final recipe, its free data, and its cores.

The scenario is tuned as a user would, all levers up to `precision`. Then these run in turns, each
in a process of its own: the unchanged script, the recipe, the recipe with batches that were made
before, and looks at the CPU time of a sample, which tell what the cores can make at most. In turns,
because the machine is faster at one time than at another. The lower one of the two limits binds.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.bench import Arm, Bench, Record, cells, comparison, interleave, open_lab
from flatout.core.feeding import Feeding
from flatout.core.pipeline import Pipeline
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
class Limits:
    """What the recipe could reach: with batches that were made before, and by its cores."""

    lab: Lab
    recipe: Recipe
    final: Profile
    free_ms: list[float] = field(default_factory=list)
    trained_ms: list[float] = field(default_factory=list)
    pipelines: list[Pipeline] = field(default_factory=list)

    def run(self) -> None:
        """Look once; what drawing a replayed batch takes is no part of free data."""
        trial = self.lab.look("free data", self.recipe, replay_probe(self.final, "host"), None)
        pipeline = find_pipeline(self.lab, self.recipe, self.final, all_cores=True)
        if trial.profile is None or pipeline is None:
            return
        self.free_ms.append(free_ms_of(trial.profile))
        self.trained_ms.append(find_trained_ms(self.lab, self.recipe, trial.profile))
        self.pipelines.append(pipeline)

    def feeding(self, measured: Profile) -> Feeding:
        """Return how far a measured step is from the limits, by what is in the middle of each."""
        if not self.pipelines:
            raise SystemExit("the samples of the recipe could not be looked at")
        middle = sorted(self.pipelines, key=lambda x: x.cpu_ms)[(len(self.pipelines) - 1) // 2]
        free_ms, trained_ms = map(statistics.median, (self.free_ms, self.trained_ms))
        return feeding_of(measured, free_ms, middle, trained_ms)


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
        interleave([plain, ours], 1)
        limits.run()
        bench.say(f"  round {number + 1} of {rounds}")
    # The arm's steps hold their part of the epochs' start already.
    step_ms = replace(final.step_ms, median=ours.median_ms)
    found = limits.feeding(replace(final, step_ms=step_ms, epoch_start_ms=0.0))
    return record_of(ablation.recipe, found, (plain, ours), limits)


def record_of(recipe: Recipe, found: Feeding, arms: Sequence[Arm], limits: Limits) -> Record:
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
            *limit_rows(found),
            *beside_training(found, limits.lab.machine.usable_cores),
        ],
        raw={
            "times_s": {arm.name: arm.times_s for arm in arms},
            "free_ms": limits.free_ms,
            "trained_ms": limits.trained_ms,
            "made_ms": [x.cpu_ms for x in limits.pipelines],
            "feeding": found.to_json(),
        },
        repeat=f"python -m benchmarks.run {THEME}",
        recipe=recipe,
        notes=[
            f"A sample takes {found.made_ms:.2f} ms of a core to make under the recipe, and "
            f"{found.trained_ms:.2f} ms to train on.",
        ],
    )


def beside_training(found: Feeding, cores: int) -> list[tuple[str, ...]]:
    """Return the rate if making were only decoding, on cores that also train, as on a CPU they do.

    No limit of the recipe: what a pipeline could reach that does nothing but decode.
    """
    if found.decode_per_s is None:
        return []
    decode_ms = 1e3 * cores / found.decode_per_s
    rate = 1e3 * cores / (decode_ms + found.trained_ms)
    share = found.samples_per_s / rate
    words = f"were making only decoding, beside the training: reached {share:.0%}"
    return [(words, "", format_rate(rate), "", "", "")]


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
