"""What the device really did for a few steps: kernels, copies and launches by torch's profiler.

`KernelTrace` runs after the measured steps, never during them; `trace_facts` sums it up. Torch's
profiler is one for the whole process: with `watch` and `begin`, ours gives way to the script's own.
On an H200 it found the kernels of a GPT and of convolutions.
"""

import contextlib
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.autograd import profiler

from flatout.agent import patching
from flatout.analysis.trace import (
    DEVICE_KINDS,
    LAUNCH_KINDS,
    length,
    merged,
    span,
    summarise_device,
    without,
)

BARRED = "the script uses torch's profiler itself"
"""What probes say that do without."""
MOMENTS = ("_prepare_trace", "_start_trace")
"""Methods of torch's profile, through which every profile of torch's goes."""


@dataclass(slots=True)
class _Turn:
    """Whose turn it is."""

    is_watching: bool = False
    is_ours: bool = False
    """Whether what is prepared or started now is flatout's."""
    was_scripts: bool = False
    """Whether the script prepared or started one."""
    give_way: Callable[[], None] | None = None
    """Ends the one of flatout's that runs."""


_turn = _Turn()


def watch() -> None:
    """Notice when the script comes, from now on; call it before the training begins.

    A second profile alongside a first ends its record or raises, and in a line of the script's.
    Scripts prepare theirs some steps before they start it, so both moments are watched. A script
    that was seen to use it is left alone from then on.
    """
    if _turn.is_watching:
        return
    _turn.is_watching = True
    for name in MOMENTS:
        patching.wrap(profiler.profile, name, _watched)


def begin(running: Any, stop: Callable[[], None]) -> bool:
    """Start a profile of flatout's; return False, without it, where the script uses one.

    Args:
        running: A profile of torch's that was not entered yet.
        stop: Ends it, before the script begins one of its own; where it has ended already,
            does nothing.
    """
    watch()
    if _turn.was_scripts or profiler._is_profiler_enabled:
        return False
    with ours():
        running.__enter__()
    _turn.give_way = stop
    return True


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Take what is prepared or started in here for flatout's."""
    before, _turn.is_ours = _turn.is_ours, True
    try:
        yield
    finally:
        _turn.is_ours = before


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not _turn.is_ours:
            _turn.was_scripts = True
            give_way, _turn.give_way = _turn.give_way, None
            if give_way is not None:
                # The script's line must not fail because ours could not end.
                with contextlib.suppress(Exception):
                    give_way()
        return original(*args, **kwargs)

    return watched


TRACED_STEPS = 3
"""Enough to average over; the profiler's own cost does not touch the measured steps."""
MAX_TRACED_S = 3.0
"""Longer steps are traced once: each timed trial of a tuning pays for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTrace:
    """What the profiler wrote of a device."""

    events: Sequence[Mapping[str, Any]]
    """As in a Chrome trace."""
    lasted_s: float = 0.0
    """Time that was traced, by the host's clock."""


class KernelTrace:
    """Trace the activity of a training's device between `start` and `stop`."""

    def __init__(self, device: Any) -> None:
        from torch.profiler import ProfilerActivity, profile

        # There is one cycle of events; without the last word torch warns, in the script's output,
        # that later ones would clear it.
        self.profile: Any = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        self.device = device
        self.began = 0.0
        self.is_running = False

    def start(self) -> None:
        """Begin tracing at a step boundary.

        Raises:
            RuntimeError: where the script uses torch's profiler; there can be only one.
        """
        import torch

        torch.cuda.synchronize(self.device)
        self.is_running = begin(self.profile, self.give_way)
        self._require()
        self.began = time.perf_counter()

    def give_way(self) -> None:
        """End tracing before the script begins a profile of its own."""
        if self.is_running:
            self.is_running = False
            self.profile.__exit__(None, None, None)

    def stop(self) -> DeviceTrace:
        """End tracing and return what ran on the device, and what launched it.

        Raises:
            RuntimeError: where the script began a profile of its own meanwhile.
        """
        import torch

        self._require()
        torch.cuda.synchronize(self.device)
        lasted_s = time.perf_counter() - self.began
        self.give_way()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        kinds = {*DEVICE_KINDS, *LAUNCH_KINDS}
        kept = [event for event in events if event.get("cat") in kinds]
        return DeviceTrace(events=kept, lasted_s=lasted_s)

    def _require(self) -> None:
        if not self.is_running:
            raise RuntimeError(BARRED)


def steps_to_trace(step_s: float) -> int:
    """Return how many steps of this length are traced.

    >>> steps_to_trace(0.2), steps_to_trace(20.0)
    (3, 1)
    """
    return TRACED_STEPS if TRACED_STEPS * step_s <= MAX_TRACED_S else 1


def trace_facts(trace: DeviceTrace, segments: int) -> dict[str, Any]:
    """Return what a trace of so many segments says of one, as fields of `DeviceSeen`.

    >>> kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 1e6}
    >>> facts = trace_facts(DeviceTrace(events=[kernel], lasted_s=2.0), 2)
    >>> facts["busy_share"], facts["trace"].product_share, facts["trace"].step_ms
    (0.5, 1.0, 1000.0)
    """
    whole = [event for event in trace.events if event.get("ph") == "X"]
    return {
        "busy_share": busy_share(whole, trace.lasted_s),
        "h2d_s_per_segment": copied_to_device_s(whole) / segments,
        "trace": summarise_device(trace.events, segments, 1e6 * trace.lasted_s),
    }


def busy_share(events: Iterable[Mapping[str, Any]], lasted_s: float = 0.0) -> float | None:
    """Return the share of time in which at least one kernel ran; None without kernels.

    The time is what was traced: a step that begins with a wait for data is not all busy because
    nothing ran before its first kernel.

    >>> busy_share([
    ...     {"cat": "kernel", "ts": 0.0, "dur": 1.0},
    ...     {"cat": "kernel", "ts": 0.5, "dur": 1.0},
    ...     {"cat": "kernel", "ts": 2.5, "dur": 0.5},
    ... ])
    0.6666666666666666
    """
    spans = merged(span(event) for event in events if event["cat"] == "kernel")
    total_us = max(1e6 * lasted_s, spans[-1][1] - spans[0][0]) if spans else 0.0
    return length(spans) / total_us if total_us > 0 else None


def copied_to_device_s(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds in which copies from the host ran and no kernel: the step waits for these.

    A copy on a stream of its own, alongside the computation, costs the step nothing.

    >>> copied_to_device_s([
    ...     {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 0.0, "dur": 2e6},
    ...     {"cat": "kernel", "name": "a", "ts": 5e5, "dur": 1e6},
    ... ])
    1.0
    """
    listed = list(events)
    kernels = [span(event) for event in listed if event["cat"] == "kernel"]
    copies = [
        span(event)
        for event in listed
        if event["cat"] == "gpu_memcpy" and "HtoD" in str(event["name"])
    ]
    return length(without(copies, kernels)) / 1e6
