"""A/A: a baseline compared with itself must not be called different.

Ninety comparisons are made of simulated trials and ten of real ones; all hundred go through the
very comparison that the tuner decides by. Kept and worse both count as different.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.bench import Bench, Record, open_lab, trials_in
from flatout.records.machine import Machine
from flatout.records.profile import PHASES, Profile, Spread
from flatout.records.recipe import Recipe
from flatout.records.statistics import Decision
from flatout.records.trial import Outcome, Trial, Workload
from flatout.tuning.pairs import play
from flatout.tuning.trial_runner import TrialRunner
from flatout.tuning.trials import TrialOptions
from flatout.workflow.demo import scenarios

THEME = "aa"
SIMULATED, REAL = 90, 10
MOST_DIFFERENT = 1
PRIOR_TRIALS = 6
NOISES = ((0.025, 0.40), (0.066, -0.09), (0.028, 0.0))
"""Standard deviation of the log of a trial, and lag-1 autocorrelation: as measured on a GPT, a
ResNet and an MLP on two cores (guard.md 1.1)."""
TAIL_SHARE, TAIL_SCALE = 0.05, 2.5
"""One trial in twenty strays further, as they do: a worst case that normal noise hides."""
DIFFERENT = (Decision.KEPT, Decision.WORSE)


def run(bench: Bench) -> Record:
    """Make all comparisons and count how many were called different."""
    simulated = [simulate(bench, number) for number in range(SIMULATED)]
    real = play_real(bench)
    different = [d for d in (*simulated, *real) if d in DIFFERENT]
    return Record(
        theme=THEME,
        claim=f"at most {MOST_DIFFERENT} of {SIMULATED + REAL} A/A comparisons is called different",
        holds=len(different) <= MOST_DIFFERENT,
        finding=f"{len(different)} of {SIMULATED + REAL} called different",
        table=[
            ("comparisons", "n", *(d.value for d in Decision)),
            _row("simulated", simulated),
            _row("real", real),
        ],
        raw={
            "simulated": [d.value for d in simulated],
            "real": [d.value for d in real],
            "trials": trials_in(bench.work / "aa"),
        },
    )


def simulate(bench: Bench, seed: int) -> Decision:
    """Return what the tuner says about a baseline against itself, on simulated trials."""
    deviation, correlation = NOISES[seed % len(NOISES)]
    times_s = trace(random.Random(seed), deviation, correlation)

    def run_simulated(
        workload: Workload, recipe: Recipe, machine: Machine, options: TrialOptions
    ) -> Trial:
        del workload, machine, options
        return Trial(recipe=recipe, outcome=Outcome.OK, profile=profile_of(next(times_s)))

    script = Workload(target="simulated.py")
    lab = replace(open_lab(bench, script, f"simulated/{seed}"), runner=run_simulated)
    for _ in range(PRIOR_TRIALS):
        lab.time(Recipe())
    return compare_with_itself(lab)


def compare_with_itself(lab: TrialRunner) -> Decision:
    """Return what the tuner's own comparison says about two equal sides."""
    base = Recipe()
    return lab.drive(play(lab.history, base, replace(base), may_go_on=lambda _: True)).decision


def profile_of(step_s: float) -> Profile:
    """Return a profile that says nothing but its step time."""
    step_ms = 1e3 * step_s
    return Profile(
        step_ms=Spread(median=step_ms, p10=step_ms, p90=step_ms, n=8),
        phases_ms=dict.fromkeys(PHASES, 0.0),
        samples_per_s=1 / step_s,
        device_kind="cpu",
        device_name="simulated",
        device_busy_share=1.0,
    )


def trace(stream: random.Random, deviation: float, correlation: float) -> Iterator[float]:
    """Return step times in seconds of successive trials of one workload, drifting together."""
    log = 0.0
    while True:
        shock = stream.gauss(0, deviation * math.sqrt(1 - correlation**2))
        if stream.random() < TAIL_SHARE:
            shock *= TAIL_SCALE
        log = correlation * log + shock
        yield 0.1 * math.exp(log)


def play_real(bench: Bench) -> list[Decision]:
    """Return what the rule says about real baselines, in one session as a tuning has it."""
    workload = bench.workload(scenarios() / "already_tuned" / "train.py")
    lab = open_lab(bench, workload, "aa")
    decisions = []
    for number in range(REAL):
        decisions.append(compare_with_itself(lab))
        bench.say(f"  A/A {number + 1} of {REAL}: {decisions[-1].value}")
    return decisions


def _row(name: str, decisions: Sequence[Decision]) -> tuple[str, ...]:
    counts = Counter(decisions)
    return (name, str(len(decisions)), *(str(counts[d]) for d in Decision))
