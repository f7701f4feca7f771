"""The child's side of a measurement: decide when there are enough steps, write one JSON, stop."""

import atexit
import contextlib
import functools
import inspect
import itertools
import json
import math
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from flatout.agent import patching
from flatout.agent.measuring import kernels as one_profiler
from flatout.agent.measuring.device_clock import DeviceClock
from flatout.agent.measuring.kernels import KernelTrace, steps_to_trace, trace_facts
from flatout.agent.measuring.operators import GarbageClock
from flatout.agent.probes import Probe, results
from flatout.agent.processes import kill_own_descendants
from flatout.agent.ranks import Ranks
from flatout.agent.session import Session
from flatout.agent.training_device import find_cuda_devices
from flatout.analysis import steps as stepping
from flatout.analysis.steps import Step, groups_of, places_of, steps_of
from flatout.hardware.load import LoadReading, load_meter, process_tree
from flatout.records.files import plain
from flatout.records.json_records import to_plain
from flatout.records.machine import GPU_VARIABLES, HIDES_ALL
from flatout.records.phase_clock import OTHER, Clock
from flatout.records.profile import ModelFacts, OptimizerFacts, PeakBytes
from flatout.records.readings import CompileFacts
from flatout.records.trial_result import DeviceSeen, Segment, TrialResult

Record = TypeVar("Record")

ROUNDS = 500


def listening_cost_s(session: Session) -> float:
    """Return the seconds per training step that the hook points' own code takes in a tight loop.

    Each change of phase goes through one wrapper: an identity check, two clock readings and an
    event. That is timed on a spare clock, in the process that used the wrappers, and multiplied by
    the changes counted in the run.
    """
    segments = max(1, len(session.segments))
    spare = Clock()
    heard = 0
    start = time.perf_counter()
    for _ in range(ROUNDS):
        if session.is_mine():
            spare.push(OTHER)
            spare.pop()
        heard += len(session.listeners["forward"])
    per_change_s = (time.perf_counter() - start) / ROUNDS
    return per_change_s * session.clock.changes / segments


class StepsSoFar:
    """Keeps what earlier looks found; a look costs what is new, and little for the rest.

    Putting a step together takes 10 us. Where each look, a few steps after the last, did it for all
    steps so far, that would be 80 us of every step.
    """

    def __init__(self) -> None:
        self.first: Segment | None = None
        """Begin again when it changes: the script's own marks forget what came before them."""
        self.singles: list[Step] = []

    def of(self, segments: Sequence[Segment]) -> Sequence[Step]:
        """Return the training steps of the segments."""
        first = segments[0] if segments else None
        if first is not self.first or len(segments) < len(self.singles):
            self.first, self.singles = first, []
        if first is not None and any(segment.who != first.who for segment in segments):
            return steps_of(segments)
        # One optimizer: each segment is a step.
        self.singles += steps_of(segments[len(self.singles) :])
        return self.singles


GROWTH = 1.15
"""Segments are grouped again when there are this many times more: grouping a thousand takes a
millisecond, and the steps of a small model no longer."""


class MadeSteps:
    """Count the steps where optimizers take turns, and where they follow each other."""

    def __init__(self) -> None:
        self.grouped_at = 0
        self.in_sequence = 0
        """Steps of all trainings, where there is more than one so far, or optimizers are made
        again within one."""

    def __call__(self, counts: Mapping[int, int], segments: Sequence[Segment]) -> tuple[int, int]:
        """Return the fewest and the most steps of an optimizer, both of all where they follow.

        Trainings one after the other, and loops within a loop, have optimizers that are over and a
        last one that is young: neither tells how many steps there are.
        """
        if len(counts) == 1:
            (made,) = counts.values()
            return made, made
        if len(segments) >= self.grouped_at:
            whos = [each.who for each in segments]
            trainings = groups_of(segments, whos)
            is_one = len(trainings) == 1 and len({*places_of(whos).values()}) == len(counts)
            self.in_sequence = 0 if is_one else sum(map(len, trainings))
            self.grouped_at = int(len(segments) * GROWTH) + 1
        if self.in_sequence:
            return self.in_sequence, self.in_sequence
        return min(counts.values()), max(counts.values())


def device_seen(session: Session) -> DeviceSeen:
    """Return what the training's devices hold; on the CPU the peak resident size.

    Of several the one that reserved most counts: it is full first. A device that answers no more is
    noted: after an illegal access every call fails, and the result that says so must be written all
    the same.
    """
    import resource

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    devices = find_cuda_devices(session)
    if not devices:
        return DeviceSeen(kind="cpu", peak=PeakBytes(device=held))
    fullest = max(devices, key=torch.cuda.max_memory_reserved)
    seen = DeviceSeen(
        kind="cuda",
        count=len(devices),
        peak=PeakBytes(
            allocated=torch.cuda.max_memory_allocated(fullest),
            reserved=torch.cuda.max_memory_reserved(fullest),
        ),
    )
    try:
        seen = replace(
            seen,
            name=torch.cuda.get_device_name(devices[0]),
            uuid=str(getattr(torch.cuda.get_device_properties(devices[0]), "uuid", "")),
        )
        free, total = torch.cuda.mem_get_info(fullest)
        seen = replace(seen, peak=replace(seen.peak, device=total - free))
    except RuntimeError as error:
        session.note_error(f"device: {error}")
    return seen


def environment_facts() -> dict[str, Any]:
    """Return the stack that ran, for the record."""
    import platform

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "fp32_matmul": _fp32_matmul(),
        "gpu_barred_by": _gpu_barred_by(),
    }


def _gpu_barred_by() -> str:
    """Return what in the script keeps this process from a GPU: `fork`, a variable, or nothing."""
    if torch.cuda._is_in_bad_fork():
        return "fork"
    return next((name for name in GPU_VARIABLES if os.environ.get(name) in HIDES_ALL), "")


def _unused(root: Any) -> dict[str, int]:
    """Return the bytes of parameters that DDP found unused; nothing where it does not look."""
    if not getattr(root, "find_unused_parameters", False):
        return {}
    with contextlib.suppress(Exception):  # what DDP logs is no public interface
        return {"unused_bytes": int(root._get_ddp_logging_data()["unused_parameter_size"])}
    return {}


def _fp32_matmul() -> str:
    """Return what fp32 matrix products may use: `highest` is fp32 itself; empty for unknown."""
    with contextlib.suppress(RuntimeError):  # a script that mixes torch's two ways of asking
        return str(torch.get_float32_matmul_precision())
    return ""


def keep_compilations(_: Any = None) -> None:
    """Have torch's compiler, once loaded, keep its record of every compilation: it keeps 64."""
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None and hasattr(compiler, "set_compilation_metrics_limit"):
        compiler.set_compilation_metrics_limit(MOST_COMPILATIONS)


def compile_facts() -> CompileFacts | None:
    """Return what torch's compiler did so far; None where it did nothing, or keeps no log."""
    compiler = sys.modules.get("torch._dynamo.utils")
    log = getattr(compiler, "get_compilation_metrics", None)
    made = [each for each in log() if each.co_name] if log is not None else []
    if not made:
        return None
    again = [each for each in made if each.cache_size]
    by_place = Counter((each.co_filename, each.co_firstlineno) for each in again)
    place, most = by_place.most_common(1)[0] if again else (("", 0), 0)
    reasons = [
        str(each.recompile_reason or "").partition("\n")[0].partition(": ")[2].partition("#")[0]
        for each in again
        if (each.co_filename, each.co_firstlineno) == place
    ]
    return CompileFacts(
        seconds=sum(each.entire_frame_compile_time_s or 0.0 for each in made),
        recompiles=len(again),
        recompile_s=sum(each.entire_frame_compile_time_s or 0.0 for each in again),
        most=most,
        place=f"{Path(place[0]).name}:{place[1]}" if again else "",
        reason=reasons[-1].strip()[:MAX_REASON] if reasons else "",
    )


MAX_REASON = 120
MOST_COMPILATIONS = 100_000
"""Records of the compiler that are kept, some kilobytes each."""
LOAD_EVERY_S = 0.25
"""How often the machine's load is read at most."""
LOAD_SHARE = 0.0005
"""Share of the time that may go into reading it: one takes 0.3 ms, in cold caches over 1 ms."""
CHECK_GROWTH = 1.15
"""Growth of the steps between two looks at the stopping rule: a constant share, however fast."""
CHECK_SHARE = 0.003
"""Share of the time that may go into those looks: with short steps they come less often."""
REFUSED_AFTER = 2
"""Steps after which a technique that only refused will not act any more: all has passed its hook
points. What
refuses later (a compiler that gave up) says so at the end of the trial."""
PARTIAL_S = 3.0
"""Time in training after which a script that is killed leaves numbers; most trials end by then."""
PARTIAL_SHARE = 0.0005
"""Share of the time that may go into writing down what is known so far."""
MAX_CRASH = 4_000
"""Characters of an exception that are kept: its own line and the frames next to it."""
MAX_SKEW = 5
"""An optimizer this many times ahead of the slowest ends the wait for it."""


class Recorder:
    """Record one training process until it has shown enough."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.spec = session.spec
        self.device = DeviceClock(session)
        self.ranks = Ranks(self.spec.folder)
        self.meter = load_meter()
        self.readings: list[LoadReading] = []
        self.read_root = 0
        self.read_at = session.clock.now()
        self.next_check = 4
        self.made = MadeSteps()
        self.steps = StepsSoFar()
        self.idle = 0
        """Segments that need no look, and the moment from which one is due all the same."""
        self.look_at = 0.0
        self.crash = ""
        self.crash_trace = ""
        self.check_at = 0.0
        self.partial_at = 0.0
        self.crashed_at = 0.0
        self.is_written = False
        self.trace: KernelTrace | None = None
        self.traced_from: int | None = None
        self.trace_until = 0
        self.timed_readings: int | None = None
        self.traced: dict[str, Any] = {}
        """Fields of `DeviceSeen` that a trace of the kernels gives."""
        self.probes: dict[str, Probe] = {}
        self.has_enough = False
        """Whether a probe said that it needs no more steps."""
        self.garbage = GarbageClock(session)

    def install(self) -> None:
        """Follow the session, and write when the script ends on its own too."""
        self.read_load()
        one_profiler.watch()
        self.garbage.install()
        self.session.on("root", keep_compilations)
        self.session.on("segments", self.saw_segments)
        self.session.on("enough", self.saw_enough)
        if self.spec.ends_when_refused:
            self.session.on("segment", self._saw_early_segment)
        atexit.register(self.write, "script_ended")
        patching.wrap(sys, "excepthook", self._keeping_error)
        patching.wrap(os, "_exit", self._writing_before)

    def _keeping_error(self, previous: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook of what ends the script, which keeps it for the result."""

        def crashed(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            said = "".join(traceback.format_exception_only(kind, error)).strip()
            # mp.spawn puts the other process's traceback into the text: its last line is the error.
            self.crash = said if len(said) < MAX_CRASH else f"{said[:2000]}\n{said[-2000:]}"
            self.crash_trace = "".join(traceback.format_exception(kind, error, trace))[-MAX_CRASH:]
            self.crashed_at = time.time()
            previous(kind, error, trace)

        return crashed

    def _writing_before(self, leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
        """Return `os._exit` with the result written: it skips atexit; forked trainers end by it."""

        @functools.wraps(leave)
        def exit_now(status: int) -> NoReturn:
            self.session.quietly(self.write)("script_ended")
            leave(status)

        return exit_now

    def saw_segments(self, segments: Sequence[Segment]) -> None:
        """Read the load now and then, and stop once the steps are enough."""
        session = self.session
        moment = session.clock.since
        if self.has_enough:
            self._stop()
        self.idle -= len(segments)
        if (self.idle > 0 or moment < self.check_at) and moment < self.look_at:
            return
        if moment >= self.read_at:
            self.read_load()
            pause_s = (session.clock.now() - moment) / LOAD_SHARE
            self.read_at = moment + max(LOAD_EVERY_S, pause_s)
        self._keep_partial(moment)
        self.look_at = min(self.read_at, self.partial_at)
        made = sum(session.counts.values())
        was_alone = self.ranks.is_alone
        self.ranks.progress(made)
        if was_alone and not self.ranks.is_alone:
            self.read_load()
        if self.ranks.is_over(made):
            self.finish("done")
        if self.trace is not None:
            self._end_trace()
            return
        if self.ranks.leads and not self.ranks.is_agreed():
            self._look(moment)

    def saw_enough(self) -> None:
        """End the run with the step that is under way."""
        self.has_enough = True

    def _saw_early_segment(self, _: Segment) -> None:
        """End a trial whose technique refused as soon as that is certain."""
        session = self.session
        counts = session.counts
        if not session.knows_optimizers and max(counts.values()) < MAX_SKEW * REFUSED_AFTER:
            return
        if min(counts.values()) < REFUSED_AFTER:
            return
        session.off("segment", self._saw_early_segment)
        # The other ranks would wait for this one: there the trial goes its whole way.
        if self.ranks.is_alone and any(
            status in ("not_applicable", "failed") for status, _why in session.status.values()
        ):
            self.finish("refused")

    def _look(self, moment: float) -> None:
        """Check the steps when there are enough more of them, and looking is cheap for the time."""
        session = self.session
        counts = session.counts
        fewest, most = self.made(counts, session.segments)
        is_known = session.is_marked or session.knows_optimizers
        if not is_known and most < MAX_SKEW * 4:
            return
        missing = min(self.next_check - fewest, MAX_SKEW * self.next_check - most)
        if missing > 0 or moment < self.check_at:
            # Each segment adds one at most: until then there is nothing to decide.
            self.idle = missing if self.ranks.is_settled else 0
            return
        self.next_check = max(fewest + 1, int(fewest * CHECK_GROWTH))
        self.check(moment)
        # A wanted number of steps is met the same way in every run: the guard compares them.
        if self.ranks.is_settled and self.trace is None and self.spec.steps is None:
            now = session.clock.now()
            self.check_at = now + (now - moment) / CHECK_SHARE

    def _keep_partial(self, moment: float) -> None:
        """Write down now and then what is known: nothing can be written when a script is killed.

        Losses, device times and probes stay out: reading them waits for the device or ends them.
        """
        if self.partial_at == 0.0:
            self.partial_at = moment + PARTIAL_S
        if moment < self.partial_at:
            return
        clock = self.session.clock
        self._save("partial", self._known("killed", self._without_losses()))
        cost_s = clock.now() - moment
        clock.lap()  # flatout's own time, of no step
        self.partial_at = clock.now() + max(PARTIAL_S, cost_s / PARTIAL_SHARE)

    def read_load(self) -> None:
        """Note the load of this training: its loader workers and other ranks are not foreign."""
        root = (None if self.ranks.is_alone else self.spec.root_pid) or os.getpid()
        root = self.spec.probes.get("turns", {}).get("root", root)
        if root != self.read_root:
            # A rank learns of the others after some segments: the counters of one process cannot be
            # taken from those of all.
            self.readings, self.read_root = [], root
        self.readings.append(self.meter.read(process_tree(root)))

    def load(self) -> dict[str, float]:
        """Return the load while the measured steps ran."""
        # Again: on a device the segments' seconds are its own by now.
        window = stepping.window_of(stepping.steps_of(self._timed()), self.period())
        readings = self.readings[: self.timed_readings]
        if not window.measured or len(readings) < 2:
            return {"delay_share": 0.0, "foreign_share": 0.0, "steal_share": 0.0}
        began = window.measured[0].end - window.measured[0].wall_s
        earlier = [r for r in readings[:-1] if r.at_s <= began] or readings[:1]
        found = self.meter.between(earlier[-1], readings[-1])
        return {
            "delay_share": found.delay_share,
            "foreign_share": found.foreign_share,
            "steal_share": found.steal_share,
            "minor_faults_per_s": found.minor_faults / found.wall_s,
            "wall_s": found.wall_s,
        }

    def check(self, moment: float) -> None:
        """Stop when the window is enough, or when time is up."""
        wanted = self.spec.steps
        steps = self.steps.of(self.session.segments)
        if wanted is not None:
            if len(steps) >= wanted:
                self._stop()
            return
        window = stepping.window_of(steps, self.period())
        # From the first step's end: preparing data and compiling may take longer than the steps.
        is_late = moment - self.session.segments[0].end > self.spec.measure_s
        awaits_more = self.session.wants_more or self._awaits_epoch(window)
        if window.is_enough and awaits_more and not is_late:
            return
        if window.is_enough or (is_late and len(window.measured) >= 3):
            self._begin_trace()

    def _awaits_epoch(self, window: stepping.Window) -> bool:
        """Return whether starting the workers again is yet to be seen and comes soon.

        The first start holds imports and page faults; what an epoch pays is seen from the second.
        """
        step_s = sum(step.wall_s for step in window.measured) / len(window.measured)
        return any(
            seen.is_training
            and seen.asked["effective_workers"] > 0
            and len(seen.starts_s)
            < stepping.wanted_starts((seen.asked["steps_per_epoch"] or math.inf) * step_s)
            for seen in self.session.loaders.values()
        )

    def _begin_trace(self) -> None:
        """On CUDA, look at the kernels of a few more steps; elsewhere stop now."""
        if not self.device.bounds or not self.spec.traces_kernels:
            self._stop()
            return
        if self.device.is_capturing():
            return  # to wait for the device now would end the script's capture of a graph
        try:
            self.read_load()  # the profiler's own work is none of the measured steps'
            self.trace = KernelTrace(self.device.device)
            self.trace.start()
        except Exception as error:  # noqa: BLE001  no profiler here: the numbers stay without it
            self.session.note_error(f"no kernel trace: {error}")
            self.trace = None
            self._stop()
            return
        segments = self.session.segments
        made = sum(map(len, groups_of(segments, [each.who for each in segments])))
        per_step = max(1, round(len(segments) / max(1, made)))
        self.traced_from, self.timed_readings = len(segments), len(self.readings)
        step_s = segments[-1].end - segments[-1 - per_step].end
        self.trace_until = self.traced_from + steps_to_trace(step_s) * per_step

    def _end_trace(self) -> None:
        """Sum up the traced steps and stop."""
        if self.trace is None or len(self.session.segments) < self.trace_until:
            return
        # Steps that rest are told in groups: more may have been traced than were asked for.
        traced = len(self.session.segments) - len(self._timed())
        try:
            self.traced = trace_facts(self.trace.stop(), traced)
        except Exception as error:  # noqa: BLE001
            self.session.note_error(f"kernel trace: {error}")
        self.session.segments[:] = self._timed()
        self.trace = self.traced_from = None
        self._stop()

    def _timed(self) -> list[Segment]:
        """Return the segments without those that are being traced: the profiler is in their time.

        A script may end while they are.
        """
        return self.session.segments[: self.traced_from]

    def _stop(self) -> None:
        """End now, or with the other ranks at a segment that all of them will reach."""
        if self.ranks.is_alone:
            self.finish("done")
        self.ranks.agree_to_stop()

    def finish(self, why: str) -> None:
        """Write the result and end this process at once.

        No exception is safe here: `except BaseException` and `finally` in the script would go on
        and save. Everything below this process is ended too.
        """
        self.write(why)
        self.ranks.leave(self.session.beat)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the script's own may have no `flush`
                stream.flush()
        try:
            kill_own_descendants()
        finally:  # the supervisor kills what is left
            os._exit(0)

    def write(self, why: str) -> None:
        """Write the result once, under its final name only when it is whole."""
        if self.is_written or not self.session.is_mine():
            return
        trained = self.session.segments or self.session.trains_elsewhere
        if why != "done" and not trained and not self.crash:
            return  # a process of the script that trained nothing
        self.is_written = True
        self.read_load()
        self.session.record_noted()
        self.session.fire("stop")
        self._save("result", self.result(why))

    def _save(self, name: str, result: TrialResult) -> None:
        """Write a result under its name only when it is whole."""
        part = Path(self.spec.folder) / f"{name}-{os.getpid()}.part"
        part.write_text(json.dumps(to_plain(result), default=plain), encoding="utf-8")
        part.replace(part.with_suffix(".json"))

    def period(self) -> int:
        """Return the number of workers behind the training batches, at least 1."""
        workers: list[int] = [
            seen.asked.get("effective_workers", seen.asked["num_workers"])
            for seen in self.session.loaders.values()
            if seen.is_training
        ]
        return max([1, *workers])

    def _without_losses(self) -> list[Segment]:
        return [replace(segment, losses=[]) for segment in self._timed()]

    def _with_losses(self) -> list[Segment]:
        """Return the segments with their losses, without those where the device failed."""
        try:
            return [replace(one, losses=[float(x) for x in one.losses]) for one in self._timed()]
        except RuntimeError as error:
            self.session.note_error(f"losses: {error}")
            return self._without_losses()

    def result(self, why: str) -> TrialResult:
        """Return everything this process knows; this ends the probes and waits for the device."""
        self.device.resolve()
        # First: a probe that failed is among the errors below.
        seen_by_probes = results(self.session, self.probes)
        self.session.conclude()
        return replace(self._known(why, self._with_losses()), probes=seen_by_probes)

    def _known(self, why: str, segments: list[Segment]) -> TrialResult:
        """Return what is known without waiting for anything."""
        session = self.session
        return TrialResult(
            why=why,
            ranks=self.ranks.facts(),
            crash=self.crash,
            crash_trace=self.crash_trace,
            crashed_at=self.crashed_at,
            segments=tuple(segments),
            period=self.period(),
            models=tuple(
                _record(ModelFacts, facts | _unused(root))
                for facts, root in itertools.zip_longest(
                    session.model_facts, session.roots[: len(session.model_facts)]
                )
            ),
            optimizers=tuple(_record(OptimizerFacts, facts) for facts in session.optimizer_facts),
            loaders=tuple(session.loaders.values()),
            status=session.status,
            errors=tuple(session.errors),
            trains_elsewhere=session.trains_elsewhere,
            draws_elsewhere=session.draws_elsewhere,
            trains_unseen=session.trains_unseen,
            collection_s=self.garbage.seconds,
            load=self.load(),
            listening_s_per_step=listening_cost_s(session),
            marking_s=self.device.marking_s,
            device=replace(device_seen(session), **self.traced),
            environment=environment_facts(),
            compiling=compile_facts(),
        )


def _record(kind: Callable[..., Record], facts: Mapping[str, Any]) -> Record:
    """Return the record of what was described; types are checked where it is read."""
    names = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in facts.items() if name in names})
