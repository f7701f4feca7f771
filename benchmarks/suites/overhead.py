"""Overhead: what listening at the seams adds to a step.

Both sides are timed the same way, by the script's own log, one fresh process per side and pair.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench import Bench, Record, TrialFailedError, cells
from flatout.core.ablation import Comparison
from flatout.core.recipe import Recipe
from flatout.core.stats import compare, gather
from flatout.core.trial import Outcome
from flatout.core.units import format_ms
from flatout.core.workload import Workload
from flatout.workflow.demo import scenarios
from flatout.workflow.trials import TrialOptions, run_trial

THEME = "overhead"
PAIRS = 20
"""With 2.5 % between equal processes, twenty pairs show a mean difference to within 1.7 %."""
STEPS, WARMUP_STEPS = 25, 10
"""Later than any warm-up that was seen, so that discovery of the root module is over."""
MOST_SHARE = 0.01


def run(bench: Bench, pairs: int = PAIRS) -> Record:
    """Train with and without the seams, side by side, and compare the steps."""
    plain: list[float] = []
    listened: list[float] = []
    for number in range(pairs):
        sides = [(plain, train_plainly), (listened, train_listened)]
        for times, train in sides if number % 2 == 0 else sides[::-1]:
            log = logs(bench) / f"{number}-{train.__name__}.jsonl"
            train(bench, workload(bench, log))
            times.append(step_s(log))
        bench.say(f"  pair {number + 1} of {pairs}: {plain[-1]:.4f} s, {listened[-1]:.4f} s")
    pair = compare(gather(listened, plain))
    return Record(
        theme=THEME,
        claim=f"listening adds at most {MOST_SHARE:.0%} to a step",
        holds=pair.ratio <= 1 + MOST_SHARE,
        finding=finding(pair),
        table=[
            ("", "step (median of processes)", "added", "95 % interval", "n"),
            ("without flatout", format_ms(1e3 * statistics.median(plain)), "", "", str(pairs)),
            (
                "with its seams",
                format_ms(1e3 * statistics.median(listened)),
                f"{pair.ratio - 1:+.1%}",
                f"{pair.interval[0] - 1:+.1%} to {pair.interval[1] - 1:+.1%}",
                cells(pair)[2],
            ),
        ],
        raw={"plain_s": plain, "listened_s": listened},
        repeat=f"python -m benchmarks.run {THEME}",
    )


def finding(pair: Comparison) -> str:
    """Return the overhead with its interval."""
    low, high = (end - 1 for end in pair.interval)
    return f"{pair.ratio - 1:+.1%} of the step ({low:+.1%} to {high:+.1%})"


def logs(bench: Bench) -> Path:
    """Return the folder of the logs: beside the working folder, whose changes a trial undoes."""
    folder = bench.work / "logs"
    folder.mkdir(exist_ok=True)
    return folder


def workload(bench: Bench, log: Path) -> Workload:
    """Return slow compute with its own log of step times switched on."""
    folder = bench.work / "work"
    folder.mkdir(exist_ok=True)
    return Workload(
        target=str(scenarios() / "slow_compute" / "train.py"),
        arguments=("--steps", str(STEPS), "--evals", "1", "--log", str(log)),
        folder=folder,
        python=sys.executable,
    )


def train_plainly(bench: Bench, workload: Workload) -> None:
    """Run the script as its user would."""
    del bench
    done = subprocess.run(
        [workload.python, workload.target, *workload.arguments],
        cwd=workload.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise TrialFailedError(done.stderr[-2_000:])


def train_listened(bench: Bench, workload: Workload) -> None:
    """Run the script as a trial. Its log survives because temporary files are not undone."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(logs(bench))
    try:
        trial = run_trial(workload, Recipe(), bench.machine, TrialOptions(steps=STEPS))
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
    if trial.outcome is not Outcome.OK:
        raise TrialFailedError(trial.message)


def step_s(log: Path) -> float:
    """Return the median step after warm-up, as the script's log has it."""
    lines = log.read_text(encoding="utf-8").splitlines()
    return median_step_s([json.loads(line) for line in lines])


def median_step_s(rows: Sequence[dict[str, float]]) -> float:
    """Return the median step after warm-up.

    Raises:
        TrialFailedError: if there are too few steps.
    """
    late = [row["step_ms"] for row in rows if row["step"] > WARMUP_STEPS]
    if len(late) < STEPS - WARMUP_STEPS - 1:
        raise TrialFailedError(f"only {len(rows)} of {STEPS} steps are in the log")
    return statistics.median(late) / 1e3
