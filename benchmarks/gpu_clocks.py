"""flatout's clocks and counters against what is known: the wall clock, itself switched off, loads.

Four questions, each a stage: do its device times agree with a clock that waits for the device; what
does listening add to a step that launches bind; what does reading the counters add; and do the
counters show what a known load must make them show. Written without a GPU: never run on one.
"""

import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench
from benchmarks.ladder import SMALL_GPT
from benchmarks.programs import ran
from benchmarks.suites import overhead
from flatout.hardware.counters import CounterSampler, open_sources
from flatout.records.profile import PHASES, Profile
from flatout.records.statistics import student_quantile
from flatout.records.trial import Workload
from flatout.records.units import format_ms, format_share
from flatout.workflow.measure import measure

SCRIPTS = Path(__file__).parent / "scripts"
STEPS, SMOKE_STEPS = 60, 5
"""Steps of each half of a timed run by the wall clock."""
STEP_OFF, PHASE_OFF, TRACE_OFF = 0.03, 0.10, 0.15
"""How far flatout may be from the wall clock: of the step, of the phases of a step that the device
binds, of the trace, whose profiler slows what it looks at."""
LEAST_PHASE = 0.05
"""Share of the step below which a phase is not compared."""
LISTENING_SHARE, SAMPLING_SHARE = 0.03, 0.01
"""What listening may add to a step of 2 to 5 ms, the whole interval; and reading the counters."""
LEAST_PROCESSES, LEAST_PAIRS = 4, 6
"""With fewer there is no evidence."""
BLOCK_S, SMOKE_BLOCK_S, EDGE_S = 1.0, 3.0, 0.15
"""Counters are read for so long, then not; what is left out after each change."""
LOAD_S, SMOKE_LOAD_S = 4.0, 0.8
MOST_S = 90.0
"""One process at most."""
PHASES_SEEN = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A script whose times are looked at."""

    name: str
    script: str
    arguments: tuple[str, ...]
    smoke: tuple[str, ...]
    is_bound_by_device: bool
    """Whether the device is the slower side: then what it takes for a phase is the phase."""

    def workload(self, bench: Bench, *, smoke: bool) -> Workload:
        """Return it in a folder of its own."""
        arguments = self.smoke if smoke else self.arguments
        return bench.workload(SCRIPTS / self.script, *arguments, name=f"work/{self.name}")


LAUNCHES = Job(
    name="launches",
    script="steps.py",
    arguments=("--width", "256", "--layers", "40", "--batch-size", "64", "--steps", "1000000"),
    smoke=("--width", "32", "--layers", "6", "--batch-size", "16", "--steps", "1000000"),
    is_bound_by_device=False,
)
"""Some 300 small kernels a step: of 2 to 5 ms, and the host is the slower side."""
JOBS = (
    LAUNCHES,
    Job(
        name="products",
        script="naive_gpt2.py",
        arguments=("--batch-size", "8", "--context", "1024", "--layers", "6"),
        smoke=SMALL_GPT,
        is_bound_by_device=True,
    ),
)


def clocks(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Time each job by the wall clock and by flatout."""
    deadline = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    for job in JOBS:
        left_s = deadline - time.monotonic()
        rows.append(_timed(job, bench, left_s / 2, smoke=smoke))
        bench.say(f"  {clock_words(rows[-1])}")
        bench.note({"rows": rows})
    return {"rows": rows}


def _timed(job: Job, bench: Bench, seconds: float, *, smoke: bool) -> dict[str, Any]:
    workload = job.workload(bench, smoke=smoke)
    true = by_wall_clock(workload, bench.work / f"{job.name}.json", seconds, smoke=smoke)
    del true["ends_s"]
    trial = measure(workload, limit_s=seconds, machine=bench.machine)
    if trial.profile is None:
        raise RuntimeError(f"{job.name}: {trial.outcome.value}: {trial.message}")
    return compared_clocks(job, true, trial.profile)


def compared_clocks(job: Job, true: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """Return how far flatout's times are from the wall clock's."""
    known = {"step": profile.step_ms.median / true["step_ms"] - 1}
    if job.is_bound_by_device:
        known |= {
            name: profile.phases_ms[name] / true["phases_ms"][name] - 1
            for name in PHASES_SEEN
            if true["phases_ms"][name] > LEAST_PHASE * true["step_ms"]
        }
    if profile.trace is not None:
        known["trace"] = profile.trace.step_ms / true["step_ms"] - 1
    allowed = {"step": STEP_OFF, "trace": TRACE_OFF} | dict.fromkeys(PHASES_SEEN, PHASE_OFF)
    return {
        "job": job.name,
        "true": dict(true),
        "step_ms": profile.step_ms.median,
        "phases_ms": {name: profile.phases_ms[name] for name in PHASES},
        "device": profile.device_kind,
        "busy_share": profile.device_busy_share,
        "off": known,
        "holds": profile.device_kind == "cuda"
        and "trace" in known
        and all(abs(off) <= allowed[name] for name, off in known.items()),
    }


def by_wall_clock(
    workload: Workload, result: Path, seconds: float, *, smoke: bool
) -> dict[str, Any]:
    """Return a script's times by a clock that knows nothing of flatout."""
    steps = str(SMOKE_STEPS if smoke else STEPS)
    command = [sys.executable, str(SCRIPTS / "wall_clock.py"), str(result), steps]
    done = ran(
        [*command, str(workload.target), *workload.arguments],
        cwd=workload.folder,
        timeout=max(1.0, seconds if smoke else min(seconds, MOST_S)),
    )
    if done.returncode != 0 or not result.exists():
        raise RuntimeError(done.stderr.strip()[-500:])
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def clocks_agree(result: Mapping[str, Any]) -> bool:
    """Return whether each job's times agree."""
    rows = result["rows"]
    return {row["job"] for row in rows if row["holds"]} == {job.name for job in JOBS}


def clock_words(row: Mapping[str, Any]) -> str:
    """Return one job's comparison in a line."""
    off = ", ".join(f"{name} {share:+.1%}" for name, share in row["off"].items())
    step = format_ms(row["true"]["step_ms"])
    return f"{row['job']}: {step} by the wall clock, flatout {off} (on {row['device']})"


def listening(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Train with listening on and off by turns, a process after the other until time is up."""
    workload = LAUNCHES.workload(bench, smoke=smoke)
    arguments = (*workload.arguments[:-1], "400" if smoke else "3000")
    job = overhead.Job(
        name=LAUNCHES.name,
        target=Path(workload.target),
        arguments=arguments,
        block=4 if smoke else 30,
        most_share=LISTENING_SHARE,
    )
    return processes_until(seconds, lambda seed: overhead.run_once(bench, job, seed=seed), job)


def processes_until(
    seconds: float, once: Callable[[int], Mapping[str, Any]], job: overhead.Job
) -> dict[str, Any]:
    """Run processes in which both states alternate until time is up; return what listening adds."""
    deadline = time.monotonic() + seconds
    seen: list[Mapping[str, Any]] = []
    took_s = 0.0
    try:
        while len(seen) < 2 or time.monotonic() + took_s < deadline:
            began = time.monotonic()
            seen.append(once(len(seen)))
            took_s = time.monotonic() - began
    except KeyboardInterrupt:  # the stage's time is up: what was seen counts
        if len(seen) < 2:
            raise
    found = overhead.judge(job, seen)
    return {
        "processes": seen,
        "step_ms": found.step_ms,
        "ratio": 1 + found.added,
        "interval": [1 + end for end in found.interval],
    }


def listening_is_cheap(result: Mapping[str, Any]) -> bool:
    """Return whether the whole interval, of enough processes, is below what is allowed."""
    is_enough = len(result["processes"]) >= LEAST_PROCESSES
    return is_enough and bool(result["interval"][1] <= 1 + LISTENING_SHARE)


def sampling(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Read the device's counters and leave it alone by turns while one training runs."""
    workload = LAUNCHES.workload(bench, smoke=smoke)
    result = bench.work / "sampled.json"
    block_s = SMOKE_BLOCK_S if smoke else BLOCK_S
    command = [sys.executable, str(SCRIPTS / "wall_clock.py"), str(result), "1000000"]
    blocks: list[tuple[bool, float, float]] = []
    deadline = time.monotonic() + seconds
    process = subprocess.Popen(
        [*command, str(workload.target), *workload.arguments],
        cwd=workload.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not result.with_suffix(".begun").exists() and process.poll() is None:
            time.sleep(0.1)
        if smoke:
            deadline = time.monotonic() + 10 * block_s
        while time.monotonic() + 2 * block_s < deadline and process.poll() is None:
            order = (True, False) if len(blocks) % 4 == 0 else (False, True)
            blocks += [_block(is_on=is_on, seconds=block_s) for is_on in order]
    finally:
        process.send_signal(signal.SIGINT)  # it writes its times when it is interrupted
        try:
            _, said = process.communicate(timeout=30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            said = "it did not end"
    if not result.exists():
        raise RuntimeError(said.strip()[-500:])
    ends_s = json.loads(result.read_text(encoding="utf-8"))["ends_s"]
    return added_by_sampling(blocks, ends_s) | {"device": bench.machine.device.kind}


def _block(*, is_on: bool, seconds: float) -> tuple[bool, float, float]:
    """Let some time pass, with the counters read or not; return when it was."""
    if is_on:
        with CounterSampler(open_sources()):
            began = time.perf_counter()
            time.sleep(seconds)
            return True, began, time.perf_counter()
    began = time.perf_counter()
    time.sleep(seconds)
    return False, began, time.perf_counter()


def added_by_sampling(
    blocks: Sequence[tuple[bool, float, float]], ends_s: Sequence[float]
) -> dict[str, Any]:
    """Return what reading adds to a step: the mean over neighbouring blocks, Student's interval.

    >>> ends = [0.01 * n for n in range(800)]
    >>> blocks = [(n % 2 == 0, float(n), float(n + 1)) for n in range(6)]
    >>> found = added_by_sampling(blocks, ends)
    >>> found["pairs"], abs(round(found["ratio"], 3))
    (3, 1.0)
    """
    steps_s: list[float | None] = []
    for _, began, ended in blocks:
        inside = [end for end in ends_s if began + EDGE_S <= end <= ended]
        many = len(inside) - 1
        steps_s.append((inside[-1] - inside[0]) / many if many > 0 else None)
    logs = []
    for number in range(0, len(blocks) - 1, 2):
        pair = {blocks[n][0]: steps_s[n] for n in (number, number + 1)}
        if (on := pair.get(True)) and (off := pair.get(False)):
            logs.append(math.log(on / off))
    if len(logs) < 2:
        raise RuntimeError(f"{len(logs)} pairs of blocks have steps: too few")
    reach = student_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.fmean(logs)
    return {
        "pairs": len(logs),
        "step_ms": 1e3 * statistics.median(step for step in steps_s if step),
        "ratio": math.exp(mean),
        "interval": [math.exp(mean - reach), math.exp(mean + reach)],
    }


def sampling_is_cheap(result: Mapping[str, Any]) -> bool:
    """Return whether a device was read, and the whole interval is below what is allowed."""
    is_enough = result["pairs"] >= LEAST_PAIRS and result["device"] == "cuda"
    return is_enough and bool(result["interval"][1] <= 1 + SAMPLING_SHARE)


def added_words(result: Mapping[str, Any]) -> str:
    """Return what was added to a step, with its interval."""
    low, high = (end - 1 for end in result["interval"])
    many = result["pairs"] if "pairs" in result else len(result["processes"])
    step = format_ms(result["step_ms"])
    return f"{result['ratio'] - 1:+.1%} of {step} ({low:+.1%} to {high:+.1%}, n={many})"


EXPECTED: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "idle": {"util_share": (0.0, 0.1), "sm_active_share": (0.0, 0.05)},
    "small": {"util_share": (0.5, 1.0), "sm_active_share": (0.0, 0.3)},
    "product": {
        "util_share": (0.9, 1.0),
        "sm_active_share": (0.7, 1.0),
        "tensor_active_share": (0.4, 1.0),
    },
}
"""What each load must make a counter show, from what the load is: nothing; one thread at a time,
nearly always; the matrix units, always."""


def counters(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Put each known load on the device and read its counters meanwhile."""
    deadline = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    for kind in EXPECTED:
        lasts_s = SMOKE_LOAD_S if smoke else LOAD_S
        rows.append(_read_under(kind, lasts_s, deadline - time.monotonic()))
        bench.say(f"  {load_words(rows[-1])}")
        bench.note({"rows": rows})
    return {"rows": rows}


def _read_under(kind: str, lasts_s: float, left_s: float) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPTS / "known_load.py"), kind, str(lasts_s)]
    with CounterSampler(open_sources()) as sampler:
        done = ran(command, timeout=max(1.0, left_s))
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-500:])
    began, ended = (float(line.split()[1]) for line in done.stdout.splitlines())
    found = sampler.readings("", began + lasts_s / 4, ended)
    seen = {name: getattr(found, name) for name in EXPECTED["product"]}
    return {
        "load": kind,
        "seen": seen | {"power_w": found.power_w, "clock_mhz": found.clock_mhz},
        "samples": found.samples,
        "missing": dict(found.missing),
        "holds": all(
            seen[name] is not None and low <= seen[name] <= high
            for name, (low, high) in EXPECTED[kind].items()
        ),
    }


def counters_are_right(result: Mapping[str, Any]) -> bool:
    """Return whether every load was seen as what it is."""
    return {row["load"] for row in result["rows"] if row["holds"]} == set(EXPECTED)


def load_words(row: Mapping[str, Any]) -> str:
    """Return what the counters showed under a load, in a line."""
    seen = [
        f"{name.removesuffix('_share')} {format_share(value)}"
        for name, value in row["seen"].items()
        if name in EXPECTED["product"] and value is not None
    ]
    return f"{row['load']}: {', '.join(seen) or next(iter(row['missing'].values()), 'nothing')}"


def all_words(words: Callable[[Mapping[str, Any]], str]) -> Callable[[Mapping[str, Any]], str]:
    """Return what says the rows of a result in a line."""
    return lambda result: "; ".join(map(words, result["rows"]))
