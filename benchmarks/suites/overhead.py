"""Overhead: what listening at the hook points and the timed pass's probes add to a step.

Both states alternate inside one process, some steps each; see `benchmarks.listening`. The process
is the unit: its number is the median over its pairs of blocks. Freed memory is kept in the process:
which pages the allocator gives back and faults in again is chance, and hides what listening takes.
"""

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Record, TrialFailedError
from benchmarks.listening import RESULT
from flatout.agent.step_sampler import SHORT_STEP_S
from flatout.launch.trial_process import ProcessOptions, run_process
from flatout.records.statistics import student_quantile
from flatout.records.trial_spec import TrialSpec
from flatout.records.units import format_ms
from flatout.techniques.compute.cpu_allocator import GLIBC_VARIABLES
from flatout.workflow.demo import scenarios
from flatout.workflow.measure import TIMED_PROBES

THEME = "overhead"
WARMUP = 40
"""Later than any discovery of root modules, so that what is switched is what stays."""
LIMIT_S = 120.0
MOST_SHARE = 0.01
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training script with the share that listening may add to its step."""

    name: str
    target: Path
    arguments: tuple[str, ...]
    block: int
    """Steps in one state before the switch."""
    most_share: float
    processes: int = 5


SLOW = Job(
    name="slow compute",
    target=scenarios() / "slow_compute" / "train.py",
    # One sample a step: four times the pairs in the same time, and the harder case.
    arguments=("--batch-size", "1", "--steps", "400", "--evals", "1", "--log-every", "1000"),
    block=4,
    most_share=MOST_SHARE,
    processes=6,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What listening added to the steps of one job."""

    job: Job
    added: float
    interval: tuple[float, float]
    step_ms: float
    processes: tuple[Mapping[str, Any], ...]

    @property
    def holds(self) -> bool:
        """Whether the whole interval is below what is allowed."""
        return self.interval[1] <= self.job.most_share


def run(bench: Bench) -> Record:
    """Train slow compute in both states and compare the steps."""
    return record_of(bench, THEME, (SLOW,))


def record_of(bench: Bench, theme: str, jobs: Sequence[Job]) -> Record:
    """Train each job in both states and compare the steps."""
    found = [measure(bench, job) for job in jobs]
    limits = ", ".join(f"{o.job.most_share:.0%} ({o.job.name})" for o in found)
    return Record(
        theme=theme,
        claim=f"listening adds at most {limits} to a step, whole interval",
        holds=all(overhead.holds for overhead in found),
        finding="; ".join(map(words, found)),
        table=[
            ("job", "step", "added", "95 % interval", "processes", "allowed"),
            *(
                (
                    o.job.name,
                    format_ms(o.step_ms),
                    f"{o.added:+.2%}",
                    f"{o.interval[0]:+.2%} to {o.interval[1]:+.2%}",
                    str(len(o.processes)),
                    f"{o.job.most_share:.0%}",
                )
                for o in found
            ),
        ],
        raw={o.job.name: list(o.processes) for o in found},
    )


def words(overhead: Overhead) -> str:
    """Return the overhead with its interval."""
    low, high = overhead.interval
    return f"{overhead.job.name} {overhead.added:+.2%} ({low:+.2%} to {high:+.2%})"


def measure(bench: Bench, job: Job) -> Overhead:
    """Run the job in fresh processes and return what listening added."""
    seen = []
    for number in range(job.processes):
        seen.append(run_once(bench, job, seed=number))
        bench.say(
            f"  {job.name} {number + 1} of {job.processes}: {math.expm1(added_log(seen[-1])):+.2%}"
        )
    return judge(job, seen)


def judge(job: Job, seen: Sequence[Mapping[str, Any]]) -> Overhead:
    """Return the overhead over processes, with Student's interval."""
    logs = [added_log(one) for one in seen]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = student_quantile(0.975, len(logs) - 1) * error
    off = [time for one in seen for is_on, times in one["blocks"] if not is_on for time in times]
    return Overhead(
        job=job,
        added=math.expm1(mean),
        interval=(math.expm1(mean - reach), math.expm1(mean + reach)),
        step_ms=1e3 * statistics.median(off),
        processes=tuple(seen),
    )


def added_log(one: Mapping[str, Any]) -> float:
    """Return the log of on over off: the median over the pairs of blocks of a process.

    Of each block the mean: some steps are looked into and most are not, and all of them count.

    >>> blocks = [[True, [1.1]], [False, [1.0]], [False, [2.0]], [True, [2.2]]]
    >>> round(added_log({"blocks": blocks}), 4)
    0.0953
    """
    blocks = [(is_on, math.log(statistics.fmean(times))) for is_on, times in one["blocks"]]
    pairs = [dict(blocks[i : i + 2]) for i in range(0, len(blocks) - 1, 2)]
    return statistics.median(pair[True] - pair[False] for pair in pairs)


def run_once(bench: Bench, job: Job, seed: int) -> Mapping[str, Any]:
    """Train once with the switch in place; return the blocks."""
    keep = bench.work / f"{job.name}-{seed}".replace(" ", "_")
    keep.mkdir(parents=True, exist_ok=True)
    workload = bench.workload(job.target, *job.arguments)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    spec = TrialSpec(
        measure_s=LIMIT_S,
        probes=TIMED_PROBES,
        skips_below_s=SHORT_STEP_S,
        details={"warmup": WARMUP, "block": job.block, "seed": seed},
    )
    ending = run_process(
        workload,
        ProcessOptions(
            entry="benchmarks.listening",
            spec=spec,
            keep=(RESULT,),
            environment={**os.environ, **GLIBC_VARIABLES, "PYTHONPATH": path},
            limit_s=LIMIT_S,
        ),
        keep=keep,
    )
    if ending.exit_code or not (keep / RESULT).exists():
        raise TrialFailedError(f"{job.name}: no step was timed: {ending.why} {ending.log[-2_000:]}")
    seen: dict[str, Any] = json.loads((keep / RESULT).read_text(encoding="utf-8"))
    if seen["changes"]["off"] or not seen["changes"]["on"]:
        raise TrialFailedError(f"{job.name}: the switch does not switch: {seen['changes']}")
    return seen
