"""A/A: a baseline compared with itself must not be called different.

Ninety comparisons are made of simulated trials and ten of real ones; all hundred go through the
rule that the tuner decides by. Kept and worse both count as different.
"""

import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.bench import Bench, Record, open_lab, trials_in
from flatout.core.recipe import Recipe
from flatout.core.stats import Decision, Rule, decide, gather, prior_of
from flatout.core.workload import Workload
from flatout.workflow.demo import scenarios
from flatout.workflow.pairs import play

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
    simulated = [simulate(number) for number in range(SIMULATED)]
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
            "trials": trials_in(bench.work),
        },
        repeat=f"python -m benchmarks.run {THEME}",
    )


def simulate(seed: int, rule: Rule = Rule()) -> Decision:
    """Return what the rule says about two equal sides of simulated trials."""
    deviation, correlation = NOISES[seed % len(NOISES)]
    stream = random.Random(seed)
    trials = trace(stream, deviation, correlation, PRIOR_TRIALS + 2 * rule.max_pairs)
    prior = prior_of([trials[:PRIOR_TRIALS]], rule)
    base: list[float] = []
    candidate: list[float] = []
    for number in range(rule.max_pairs):
        start = PRIOR_TRIALS + 2 * number
        first, second = trials[start : start + 2]
        base.append(first if number % 2 == 0 else second)
        candidate.append(second if number % 2 == 0 else first)
        decision = decide(gather(base, candidate, prior, rule), rule)
        if decision is not Decision.UNDECIDED:
            return decision
    return Decision.UNDECIDED


def trace(
    stream: random.Random, deviation: float, correlation: float, count: int
) -> Sequence[float]:
    """Return step times in seconds of successive trials of one workload, drifting together."""
    log, times = 0.0, []
    for _ in range(count):
        shock = stream.gauss(0, deviation * math.sqrt(1 - correlation**2))
        if stream.random() < TAIL_SHARE:
            shock *= TAIL_SCALE
        log = correlation * log + shock
        times.append(0.1 * math.exp(log))
    return times


def play_real(bench: Bench) -> list[Decision]:
    """Return what the rule says about real baselines, in one session as a tuning has it."""
    script = scenarios() / "already_tuned" / "train.py"
    workload = Workload(target=str(script), folder=bench.work, python=sys.executable)
    lab = open_lab(bench, workload, "aa")
    decisions = []
    for number in range(REAL):
        base = Recipe()
        match = play(lab, base, replace(base), may_go_on=lambda: True)
        bench.say(f"  A/A {number + 1} of {REAL}: {match.decision.value}")
        decisions.append(match.decision)
    return decisions


def _row(name: str, decisions: Sequence[Decision]) -> tuple[str, ...]:
    counts = Counter(decisions)
    return (name, str(len(decisions)), *(str(counts[d]) for d in Decision))
