"""Follows a batch from the disk to the weights: shares the timed pass.

In the training process it splits the phases of the session's clock: what is in the data wait
(fetch, collate, pinning), what copies to the device took wherever they happened, the loss between
forward and backward. In the loader's workers it times every batch and lets each write a record of
its own counters now and then. See docs/journey.md for how each number is taken.
"""

import functools
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import dataloader, get_worker_info

from flatout.agent import patching
from flatout.agent.measuring import batch_timer
from flatout.agent.measuring.batch_timer import BatchMeter
from flatout.agent.measuring.operators import TO_DEVICE, CopyTimer
from flatout.agent.session import Session
from flatout.analysis.worker_log import OwnBytes, WorkerLog, read_io, read_log, read_pss, thinned
from flatout.records.phase_clock import NAMES
from flatout.records.trial_result import Segment

PARTS = ("read", "decode", "collate", "pin", "h2d", "loss", "sync", "h2d_bytes")
"""What is taken out of the phases: seconds, and at the end bytes."""
READ, DECODE, COLLATE, PIN, H2D, LOSS, SYNC, H2D_BYTES = range(8)
OWN = -1.0
"""Number of the training process among those that make batches."""
OWN_EVERY_S = 0.25
"""Pause between two readings of the training process's own counters, at least."""
OWN_SHARE = 0.0005
"""Share of the time that may go into them: one takes 30 us in warm caches, more in cold ones."""
SELF = Path("/proc/self")
ROUNDS = 300
"""Calls over which the probe's own cost is timed when the run is over."""


def start(session: Session, options: Mapping[str, Any]) -> "JourneyProbe":
    """Follow the batches of this process; in a spawned worker, time its batches."""
    probe = JourneyProbe(session, times_copies=bool(options.get("copies")))
    probe.install()
    return probe


class JourneyProbe:
    """The parts of each segment, and the records of the processes that make batches."""

    def __init__(self, session: Session, *, times_copies: bool = False) -> None:
        self.session = session
        self.folder = Path(session.spec.folder)
        self.times_copies = times_copies
        self.width = len(NAMES)
        self.parts: dict[int, float] = {}
        """Of the running segment. What is kept for each segment stays below 512 bytes: Python has
        a place of its own for those, and a larger one would be where the tensors come and go,
        whose memory then faults in again at each step (0.6 ms of a step of 27 ms)."""
        self.rows: list[tuple[Segment, list[float], dict[int, float]]] = []
        self.calls = 0
        self.missing: dict[str, str] = {}
        self.workers: dict[int, str] = {}
        """Address of the loader behind each worker process, by its pid."""
        self.fresh: list[int] = []
        self.loss_from: tuple[int, float] | None = None
        self.last_copy = (0.0, 0.0)
        self.pin_thread_s = 0.0
        self.own = OwnMeter(self)
        self.theirs: WorkerMeter | None = None
        self.copies: CopyTimer | None = None
        os.register_at_fork(after_in_child=self._forked)

    def install(self) -> None:
        """Time the fetchers and follow the session."""
        why = batch_timer.install(self.session, self.find_meter)
        if why:
            self.missing["read, decode, collate"] = why
        if not self.own.meter.knows_delay:
            self.missing["waits for a core"] = "no /proc/thread-self/schedstat: counted as read"
        batch_timer.time_pinning(self.saw_pinning)
        self._follow_workers()
        for event, listener in (
            ("epoch", self.saw_epoch),
            ("root", self.saw_root),
            ("forward_end", self.saw_forward_end),
            ("loss", self.saw_loss),
            ("segments", self.saw_segments),
        ):
            self.session.on(event, listener)

    def find_meter(self) -> BatchMeter | None:
        """Return the meter of the running process; None in a thread that is not the loop's."""
        worker = get_worker_info()
        if worker is None:
            return self.own.meter if self.session.is_mine() else None
        if self.theirs is None:
            self.theirs = WorkerMeter(self.folder, worker.id)
        return self.theirs.meter

    def take(self, part: int, value: float) -> None:
        """Add to a part of the running phase."""
        place = part * self.width + self.session.clock.stack[-1]
        self.parts[place] = self.parts.get(place, 0.0) + value
        self.calls += 1

    def saw_root(self, root: Any) -> None:
        """Time copies from the first step on, where there is a device to copy to."""
        first = next(iter(root.parameters()))
        if (self.times_copies or not first.is_cpu) and self.copies is None:
            self.copies = CopyTimer(self.session.quietly(self.saw_copy))
            self.copies.install()

    def saw_copy(self, way: str, began: float, ended: float, source: Any) -> None:
        """Count a copy, unless it is part of making a batch, which is timed as a whole."""
        if not self.session.is_mine() or self.own.meter.fetcher or self.session.sampler.skips_left:
            return
        part = H2D if way == TO_DEVICE else SYNC
        inner_began, inner_s = self.last_copy
        if inner_began >= began:  # a tensor of the script's own class: its copy calls torch's
            self.take(part, ended - began - inner_s)
            return
        self.last_copy = (began, ended - began)
        self.take(part, ended - began)
        if part == H2D:
            self.take(H2D_BYTES, source.numel() * source.element_size())

    def saw_pinning(self, seconds: float) -> None:
        """Count a copy to pinned memory, in the loop or in the loader's own thread."""
        if not self.session.is_mine():
            self.pin_thread_s += seconds
        elif not self.session.sampler.skips_left:
            self.take(PIN, seconds)

    def saw_forward_end(self, _module: Any, _output: Any) -> None:
        """The loss may begin: note how much of the running phase has passed and was taken."""
        self.calls += 1
        phase = self.session.clock.stack[-1]
        self.loss_from = (phase, self._spent(phase))

    def saw_loss(self, _tensor: Any) -> None:
        """Backward begins: what passed of the same phase since the forward is the loss."""
        if self.loss_from is None:
            return
        phase, before = self.loss_from
        self.loss_from = None
        if phase == self.session.clock.stack[-1]:
            self.take(LOSS, max(0.0, self._spent(phase) - before))

    def _spent(self, phase: int) -> float:
        """Return seconds of a phase in this segment that no copy has taken."""
        clock = self.session.clock
        spent_s = clock.totals[phase] + clock.now() - clock.since
        if self.copies is None:
            return spent_s
        parts, width = self.parts, self.width
        return spent_s - parts.get(H2D * width + phase, 0.0) - parts.get(SYNC * width + phase, 0.0)

    def saw_segments(self, segments: Sequence[Segment]) -> None:
        """Close the row of a segment; of several the last alone may have been looked into."""
        segment = segments[-1]
        if segment.is_sampled:
            self.calls += 1
            # The host's seconds: on a GPU the device's replace them later.
            self.rows.append((segment, segment.seconds, self.parts))
            self.parts = {}
            self.loss_from = None
        if segment.end >= self.own.next_at_s:
            self.own.note(segment.end)

    def saw_epoch(self, address: str) -> None:
        """The worker processes that were just started belong to this loader."""
        for pid in self.fresh:
            self.workers[pid] = address
        self.fresh.clear()

    def _follow_workers(self) -> None:
        kind: Any = getattr(dataloader, "_MultiProcessingDataLoaderIter", None)
        if kind is None:
            self.missing["workers"] = "this torch has no worker iterator that is known here"
            return
        patching.wrap(kind, "__init__", self._noting_workers)

    def _noting_workers(self, build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def construct(iterator: Any, *args: Any, **kwargs: Any) -> None:
            build(iterator, *args, **kwargs)
            if self.session.is_mine():
                self.fresh += [w.pid for w in getattr(iterator, "_workers", ()) if w.pid]

        return construct

    def _forked(self) -> None:
        self.rows, self.workers, self.fresh = [], {}, []
        self.parts = {}
        self.theirs = None
        self.own = OwnMeter(self)

    def cost_s(self) -> float:
        """Return the seconds that the probe's own code took on the training thread, estimated.

        A batch is timed on a spare meter, any other call as the dearest of them, a loss.
        """
        meter = BatchMeter(lambda _meter, _moment: None)
        began = time.perf_counter()
        for _ in range(ROUNDS):
            self.find_meter()
            meter.fetch(_nothing, meter, None)
        batch_s = (time.perf_counter() - began) / ROUNDS
        began = time.perf_counter()
        for _ in range(ROUNDS):
            self.session.is_mine()
            self._spent(0)
        call_s = (time.perf_counter() - began) / ROUNDS
        calls = self.calls + (self.copies.calls if self.copies else 0)
        return batch_s * self.own.made + call_s * calls + self.own.noting_s

    def _close_last_row(self) -> None:
        """Close the row of a segment at whose end the run was stopped before we heard of it."""
        segments = self.session.segments
        if segments and (not self.rows or segments[-1].end > self.rows[-1][0].end):
            self.saw_segments(segments[-1:])

    def result(self) -> Mapping[str, Any]:
        """Return rows by segment and records by process, as plain values."""
        listening_s = self.cost_s()
        self._close_last_row()
        if self.own.records:
            self.own.records[-1][-1] = read_pss(SELF)
        loaders = self.session.loaders
        training = {address for address, seen in loaders.items() if seen.is_training}
        processes = [
            {"pid": pid, "address": address, "records": records}
            for pid, address in self.workers.items()
            if (not training or address in training) and (records := read_log(self.folder, pid))
        ]
        return {
            "parts": PARTS,
            "rows": [
                {
                    "end": segment.end,
                    "host_s": None if host is segment.seconds else host,
                    "parts": {str(i): round(x, 8) for i, x in parts.items() if x},
                }
                for segment, host, parts in self.rows
            ],
            "processes": processes,
            "own": thinned(self.own.records),
            "pin_thread_s": self.pin_thread_s,
            "times_copies": self.copies is not None,
            "missing": self.missing,
            "listening_s": listening_s,
        }


def _nothing(_fetcher: Any, _index: Any) -> None:
    """Stand for a fetch that costs nothing."""


class OwnMeter:
    """Batches that the training process makes itself: `num_workers=0`."""

    def __init__(self, probe: JourneyProbe) -> None:
        self.probe = probe
        self.meter = BatchMeter(self.saw)
        self.records: list[list[float]] = []
        self.next_at_s = 0.0
        self.noting_s = 0.0
        self.before = (0.0, 0.0, 0.0)
        self.made = 0

    def saw(self, meter: BatchMeter, _moment: float) -> None:
        """Take what the batch cost out of the running phase."""
        read_s, decode_s, collate_s = self.before
        self.before = (meter.read_s, meter.decode_s, meter.collate_s)
        # Written out: this runs between two steps, where every call is felt.
        probe = self.probe
        parts, width, phase = probe.parts, probe.width, probe.session.clock.stack[-1]
        read, decode, collate = (
            READ * width + phase,
            DECODE * width + phase,
            COLLATE * width + phase,
        )
        parts[read] = parts.get(read, 0.0) + meter.read_s - read_s
        parts[decode] = parts.get(decode, 0.0) + meter.decode_s - decode_s
        parts[collate] = parts.get(collate, 0.0) + meter.collate_s - collate_s
        probe.calls += 3
        self.made += 1

    def note(self, moment: float) -> None:
        """Keep this process's counters."""
        began = time.perf_counter()
        made = (*self.before, self.meter.batches)
        # The size is read when the run is over: a large process takes 10 ms for it.
        self.records.append([moment, OWN, *made, *usage(), *read_io(SELF), 0.0, 0.0])
        cost_s = time.perf_counter() - began
        self.noting_s += cost_s
        self.next_at_s = moment + max(OWN_EVERY_S, cost_s / OWN_SHARE)


class WorkerMeter:
    """Batches that this loader's worker makes, and its file."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = float(number)
        self.meter = BatchMeter(self.saw)
        self.bytes = OwnBytes()
        self.log: WorkerLog | None = None
        try:
            self.log = WorkerLog(folder)
        except OSError:
            return  # the trial is over and its folder gone: this worker will be ended
        self.saw(self.meter, time.perf_counter())

    def saw(self, meter: BatchMeter, moment: float) -> None:
        """Append a record now and then; one that cannot be written ends that, not the worker."""
        if self.log is None:
            return
        try:
            self.log.write(moment, lambda: self.record(meter, moment))
        except (OSError, ValueError, IndexError):
            self.log = None

    def record(self, meter: BatchMeter, moment: float) -> list[float]:
        """Return this process's counters, as `worker_log.FIELDS`."""
        made = (meter.read_s, meter.decode_s, meter.collate_s, meter.batches)
        return [moment, self.number, *made, *usage(), *self.bytes.read(time.perf_counter())]


def usage() -> tuple[float, float, float, float]:
    """Return user and system seconds, voluntary and involuntary switches of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime, float(used.ru_nvcsw), float(used.ru_nivcsw)
