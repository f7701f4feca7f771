"""Measure flatout on one CUDA device, each call in some minutes: `make bench-gpu-right`.

A call plays a plan (`right`, `product`, `numbers`) or sets of stages by comma, into one folder.
What comes too late is skipped. `docs/gpu-plan.md` says which to play first, and what each shows.

For machines that have little but torch and numpy, and no network: the commands are called as
functions, and what is not installed costs its own stage only. Each stage is a process of its own
with a time limit of its own. Before the first and after every stage the record so far is written,
to $OUT when that is set, else to benchmarks/records/.
"""

import argparse
import datetime
import importlib.util
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import gemm, gpu_clocks, gpu_commands, gpu_guard, gpu_memory, ladder
from benchmarks.bench import Bench, brief, open_lab, trials_in
from benchmarks.gpu_record import (
    AT_ONCE,
    PLAN_S,
    PLANS,
    SETS,
    SLOW,
    STARVED,
    TUNED,
    known,
    record_of,
    stages_in,
)
from benchmarks.programs import ran
from benchmarks.record import markdown_table, out_folder, write_evidence, write_record
from benchmarks.stage_process import GRACE_S, command_for, note_to, play_inside, play_outside
from benchmarks.stage_process import LAST_S as KILL_S
from benchmarks.stages import Results, Stage, run_side_by_side, run_stages
from benchmarks.suites import overhead
from flatout.hardware.counters import open_sources
from flatout.hardware.machine import read_machine
from flatout.records.json_records import to_plain
from flatout.records.machine import Machine
from flatout.records.recipe import Recipe
from flatout.records.trial import Workload
from flatout.tuning.pairs import play
from flatout.workflow.demo import scenarios
from flatout.workflow.doctor import doctor
from flatout.workflow.measure import measure
from flatout.workflow.tune import TuneOptions

CALL_S = 540.0
"""A call ends inside nine minutes, whatever hangs: a lease ends after ten, and the way back needs
the rest."""
TOTAL_S = CALL_S - GRACE_S - 2 * KILL_S - 4.0
"""For all stages: what the last one may take beyond its time, and its record, still fit in."""
START_S = 10.0
"""To look at the machine, and to start a process for each stage."""
MARGIN_S = 15.0
"""What a tuning gets less than its stage: it ends on its own rather than by the stage's alarm."""
LAST_S = 5.0
"""What a single measurement gets less, for the same reason."""
MODULES = ("numpy", "PIL", "skimage", "sklearn", "rich", "click", "psutil", "pynvml")
OVERHEAD_STEPS = 200
"""Forty to warm up and forty blocks of four."""
OVERHEAD = ("--batch-size", "4")
"""Steps of a quarter of the scenario's: some six processes fit into the stage."""
ENDED_S = 15.0
"""Before the stage's end no further pair of the A/A is begun."""
ENDLESS = ("--epochs", "1000")
LEAST_RUNG_S = 120.0
"""With less, no technique can be proven: sixteen trials of eight seconds."""
SMOKE_S = 900.0
"""Of each stage that is tried out only: none is ended by its alarm on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the scenarios are made."""

    images: int = 1_200
    slow: tuple[str, ...] = (
        *("--batch-size", "16", "--context", "1024", "--layers", "12", "--width", "768"),
        *("--heads", "12", "--limit", "20000000", "--epoch-steps", "100000"),
    )
    """As large as GPT-2 124M, which fp32 keeps busy for some 200 ms a step."""
    is_smoke: bool = False
    """Whether the compute stages are made tiny, to see on a CPU that they work."""
    products: tuple[int, ...] = (4096, 8192)
    """Rows of the square matrices that our kernel and cuBLAS multiply."""
    starved: tuple[str, ...] = ("--batch-size", "32", "--image-size", "160", "--width", "384")
    """Wide enough for some 60 ms of a GPU in a step whose images take 300 ms (a guess)."""
    tuned: tuple[str, ...] = ("--batch-size", "8192", "--width", "4096", "--epoch-steps", "100000")

    def times(self, most_s: float, least_s: float) -> tuple[float, float]:
        """Return a compute stage's most and least time; enough on a busy CPU to try it out."""
        return (SMOKE_S, 5.0) if self.is_smoke else (most_s, least_s)


SMOKE = Sizes(
    images=40,
    slow=(
        *("--batch-size", "2", "--context", "16", "--layers", "1"),
        *("--width", "16", "--heads", "2"),
    ),
    starved=("--batch-size", "4", "--image-size", "32", "--width", "8"),
    tuned=("--batch-size", "64", "--width", "64"),
    is_smoke=True,
    products=(64, 96),
)
"""Made to be small: that everything works is all that such a run shows."""


def main(arguments: Sequence[str]) -> int:
    """Run all stages on the CUDA device; the exit code is 1 when the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--total-s", type=float, help="time for all stages, in seconds")
    parser.add_argument(
        "--set",
        default="all",
        help=f"one of {tuple(PLANS)}, or several by comma of {SETS}",
    )
    parser.add_argument("--stages", default="", help="only stages whose names begin so, by comma")
    parser.add_argument("--stretch", type=float, default=1.0, help="times each stage's most time")
    parser.add_argument("--smoke", action="store_true", help="tiny, on whatever device there is")
    for word in ("--alone", "--work", "--to"):  # how a stage's own process is told what to play
        parser.add_argument(word, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.alone:
        return alone(args)
    try:
        part = known(args.set)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    started = time.monotonic()
    machine = read_machine(torch=True)
    if machine.device.kind != "cuda" and not args.smoke:
        trouble = (
            f" ({machine.facts['torch_trouble']})" if machine.facts.get("torch_trouble") else ""
        )
        parser.error(f"torch sees no CUDA device here{trouble}; `make bench` measures on the CPU")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(f"{time.monotonic() - started:6.1f} {line}")
        print(lines[-1], flush=True)

    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as work:
        bench = Bench(machine=machine, work=Path(work).resolve(), say=say)
        total_s = args.total_s or PLAN_S.get(args.set, TOTAL_S)
        left_s = total_s - (time.monotonic() - started)
        sizes = SMOKE if args.smoke else Sizes()
        words = [word.strip() for word in args.stages.split(",") if word.strip()]
        stages = [
            replace(stage, most_s=stage.most_s * args.stretch)
            for stage in chosen(stages_of(bench, sizes), part, words)
        ]
        play = partial(play_apart, bench=bench, smoke=args.smoke)
        run = run_side_by_side if args.set in AT_ONCE else run_stages
        results = run_all(
            bench, stages, out_folder(), lines, total_s=left_s, play=play, part=part, run=run
        )
    record = record_of(results, part=part)
    # Last: of a machine that was lent often nothing but the end of the output comes back.
    print("\n".join([*markdown_table(record.table), f"holds: {record.holds}"]), flush=True)
    return 0 if record.holds else 1


def play_apart(stage: Stage, seconds: float, *, bench: Bench, smoke: bool) -> dict[str, Any]:
    """Play a stage in a process of its own."""
    path = bench.work / "stage.json"
    command = command_for(stage.name, bench.work, seconds, path, smoke=smoke)
    return play_outside(command, seconds, path, bench.say)


def alone(args: argparse.Namespace) -> int:
    """Play one stage, in the process that `play_apart` starts."""
    path, work = Path(args.to), Path(args.work)
    bench = Bench(
        machine=machine_for(args.alone, smoke=args.smoke),
        work=work,
        say=partial(print, flush=True),
        note=note_to(path),
    )
    stages = stages_of(bench, SMOKE if args.smoke else Sizes())
    # The clock is the machine's: to start took of the stage's time, not of its grace.
    left_s = args.total_s - (time.monotonic() - args.began)
    play_inside(next(s for s in stages if s.name == args.alone), max(1.0, left_s), path)
    return 0


def machine_for(stage: str, *, smoke: bool) -> Machine:
    """Return what a stage's process may use.

    Only doctor has to ask torch itself, which takes seconds; the others ask it where the driver
    tells of no device, since they would tune as on a machine without one.

    Raises:
        RuntimeError: if torch sees none either, and this is no smoke run.
    """
    asks_torch = stage == "facts"
    machine = read_machine(torch=asks_torch)
    if smoke or machine.device.kind == "cuda":
        return machine
    if not asks_torch:
        machine = read_machine(torch=True)
    if machine.device.kind != "cuda":
        trouble = machine.facts.get("torch_trouble", "")
        raise RuntimeError(f"the CUDA device is gone: {trouble or 'torch sees none'}")
    return machine


def chosen(stages: Sequence[Stage], name: str, words: Sequence[str]) -> list[Stage]:
    """Return the stages of sets whose names begin with one of the words; without words all."""
    asked = stages_in(SETS if name == "all" else name.split(","))
    return [
        stage
        for stage in stages
        if stage.name in asked and (not words or stage.name.startswith(tuple(words)))
    ]


def run_all(  # noqa: PLR0913  what main has put together
    bench: Bench,
    stages: Sequence[Stage],
    root: Path,
    lines: Sequence[str],
    *,
    total_s: float,
    play: Callable[[Stage, float], dict[str, Any]] | None = None,
    part: str = "all",
    run: Callable[..., Results] = run_stages,
) -> Results:
    """Run the stages and write the record before the first and after each.

    `run` plays them one after the other or side by side.
    """
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()

    def tell_and_write(results: Results) -> None:
        name, latest = list(results.items())[-1]
        why = f": {latest['why']}" if "why" in latest else ""
        bench.say(f"{name}: {latest['status']} in {latest['took_s']:.0f} s{why}")
        write(results)

    def write(results: Results) -> None:
        log = "\n".join(lines) + "\n"
        try:
            record = record_of(results, part=part)
            folder = write_record(record, bench.machine, date=date, log=log, root=root)
            write_evidence(bench.work, folder)
        except Exception:  # noqa: BLE001  the later stages must not be lost to a full disk
            bench.say(f"the record was not written: {traceback.format_exc()}")

    bench.say(f"stages: {', '.join(stage.name for stage in stages)}")
    write({})
    return run(stages, tell_and_write, total_s=total_s, play=play)


def stages_of(bench: Bench, sizes: Sizes) -> list[Stage]:
    """Return the stages, what matters most first."""
    photographs = ("--data", str(bench.work / "photographs"))
    slow = _workload(bench, SLOW, (*sizes.slow, *ENDLESS))
    starved = _workload(bench, STARVED, (*sizes.starved, *photographs, *ENDLESS))
    tuned = _workload(bench, TUNED, (*sizes.tuned, *ENDLESS))

    def stage(
        name: str, work: Callable[..., dict[str, Any]], times: tuple[float, float], **given: Any
    ) -> Stage:
        reads_images = given.get("workload") is starved
        most_s, least_s = times
        return Stage(
            name=name,
            work=partial(work, bench=bench, **given),
            most_s=most_s,
            least_s=least_s,
            needs=("photographs",) if reads_images else (),
            packages=("PIL",) if reads_images or name == "photographs" else (),
        )

    smoke = {"smoke": sizes.is_smoke}
    return [
        stage("facts", _facts, (30, 10)),
        stage("tests", gpu_commands.device_tests, sizes.times(190, 40), **smoke),
        stage(f"measure {SLOW}", _measure, (45, 15), workload=slow),
        stage(f"measure {TUNED}", _measure, (45, 15), workload=tuned),
        stage("clocks", gpu_clocks.clocks, sizes.times(75, 30), **smoke),
        stage("overhead", _overhead, (110, 60), workload=slow),
        stage("gemm", gemm.run, sizes.times(130, 40), sizes=sizes.products),
        stage("memory", gpu_memory.run, (360, 40), **smoke),
        *(
            stage(
                f"ladder {rung.name}",
                ladder.tuned,
                sizes.times(rung.most_s, LEAST_RUNG_S),
                rung=rung,
                **smoke,
            )
            for rung in ladder.RUNGS
        ),
        stage("photographs", _photographs, (45, 10), count=sizes.images),
        stage(f"measure {STARVED}", _measure, (45, 15), workload=starved),
        stage(f"tune {STARVED}", _tune, (400, 120), workload=starved),
        stage("sweep", gpu_guard.sweep, sizes.times(330, 100), **smoke),
        stage("peers", ladder.peers, sizes.times(370, 40), **smoke),
        stage("guard", gpu_guard.aa, sizes.times(260, 100), **smoke),
        stage("aa", _aa, (200, 60), workload=tuned),
        stage("counters", gpu_clocks.counters, sizes.times(45, 20), **smoke),
        stage("sampling", gpu_clocks.sampling, sizes.times(45, 20), **smoke),
        stage("listening", gpu_clocks.listening, sizes.times(120, 60), **smoke),
        stage("commands", gpu_commands.commands, sizes.times(300, 60), **smoke),
        stage("oom", gpu_commands.out_of_memory, sizes.times(190, 60), **smoke),
    ]


def _workload(bench: Bench, scenario: str, arguments: tuple[str, ...]) -> Workload:
    script = scenarios() / scenario / "train.py"
    return bench.workload(script, *arguments, name=f"work/{scenario}")


def _facts(seconds: float, bench: Bench) -> dict[str, Any]:
    """Return what decides whether anything later can be trusted, each with the time it took."""
    began = time.monotonic()
    found: dict[str, Any] = {
        "installed": [name for name in MODULES if importlib.util.find_spec(name)],
        "doctor": [to_plain(check) for check in doctor(bench.machine)],
    }
    for name, look in PREFLIGHT.items():
        if time.monotonic() - began > seconds - LAST_S:
            break
        at = time.monotonic()
        try:
            found[name] = look()
        except Exception as error:  # noqa: BLE001  what cannot be looked at is reported
            found[name] = f"{type(error).__name__}: {error}"[:500]
        found[f"{name}_s"] = round(time.monotonic() - at, 2)
        bench.note(found)
    return found


def _nvidia_smi() -> str:
    command = ["nvidia-smi", "-q", "-d", "MEMORY,CLOCK,PERFORMANCE"]
    done = ran(command, timeout=10.0)
    return done.stdout[-6_000:] or done.stderr[-500:]


def _has_byte_code() -> bool:
    import torch

    return any((Path(torch.__file__).parent / "__pycache__").glob("*.pyc"))


def _one_profiler() -> int:
    """Start torch's profiler as trials do, and return how many events a product gave."""
    import torch

    kinds = torch.profiler.supported_activities()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    return len(profile.events())


def _one_sample() -> dict[str, Any]:
    sources = open_sources()
    try:
        samples = [source.sample(is_full=True) for source in sources.found]
    finally:
        sources.close()
    return {"values": [dict(one.values) for one in samples], "trouble": sources.trouble}


PREFLIGHT: Mapping[str, Callable[[], Any]] = {
    "nvidia_smi": _nvidia_smi,
    "host_memory": lambda: Path("/proc/meminfo").read_text(encoding="utf-8")[:200],
    "shared_memory_bytes": lambda: shutil.disk_usage("/dev/shm").total,
    "has_byte_code": _has_byte_code,
    "profiler_events": _one_profiler,
    "counters": _one_sample,
}
"""What is looked at before anything is measured: each is timed, and costs nothing else if it
fails."""


def _photographs(seconds: float, bench: Bench, count: int) -> dict[str, Any]:
    command = [sys.executable, str(scenarios() / "photographs.py"), str(bench.work / "photographs")]
    done = ran([*command, "--count", str(count)], timeout=seconds)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-500:])
    return {"said": done.stdout.strip().rpartition(": ")[2]}


def _measure(seconds: float, bench: Bench, workload: Workload) -> dict[str, Any]:
    trial = measure(workload, limit_s=seconds - LAST_S, machine=bench.machine)
    if trial.profile is None:
        raise RuntimeError(f"{trial.outcome.value}: {trial.message}\n{trial.traceback[-1_500:]}")
    ladder.check_device(trial, bench.machine)
    return {"profile": trial.profile.to_json(), "trial": brief(trial)}


def _tune(seconds: float, bench: Bench, workload: Workload) -> dict[str, Any]:
    out = bench.work / "tune" / workload.folder.name
    budget_s = seconds - MARGIN_S
    options = TuneOptions(
        out=out, budget_s=budget_s, accepts_load=True, runner=ladder.run_on_device
    )
    ablation = ladder.tune_noted(workload, options, bench)
    return ablation.to_json() | {"trials": trials_in(out)}


def _overhead(seconds: float, bench: Bench, workload: Workload) -> dict[str, Any]:
    """Train with hook points on and off, one process after the other until time is up."""
    steps = ("--steps", str(OVERHEAD_STEPS), "--evals", "1")
    arguments = (*workload.arguments, *OVERHEAD, *steps)
    job = replace(overhead.SLOW, target=Path(workload.target), arguments=arguments)
    return gpu_clocks.processes_until(
        seconds, lambda seed: overhead.run_once(bench, job, seed=seed), job
    )


def _aa(seconds: float, bench: Bench, workload: Workload) -> dict[str, Any]:
    """Compare the baseline with itself as often as there is time."""
    deadline = time.monotonic() + max(0.0, seconds - ENDED_S)
    lab = open_lab(bench, workload, "aa")
    lab.history.accepts_load = True
    decisions: list[str] = []
    took_s = 0.0
    try:
        while not decisions or time.monotonic() + took_s < deadline:
            began = time.monotonic()
            base = Recipe()
            match = lab.drive(
                play(
                    lab.history,
                    base,
                    replace(base),
                    may_go_on=lambda _: time.monotonic() < deadline,
                )
            )
            if match.failure is not None:
                raise RuntimeError(f"{match.failure.outcome.value}: {match.failure.message}")
            decisions.append(match.decision.value)
            took_s = time.monotonic() - began
    except KeyboardInterrupt:
        if not decisions:
            raise
    return {"decisions": decisions, "trials": trials_in(bench.work / "aa")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
