"""What the operators of a few steps take on the CPU, each without those it calls, and where.

Torch's profiler slows small operators by a microsecond or two: for a pass of its own. The making
of batches is left out where the training process does it itself. The step before those that are
timed shows in which modules and lines the operators are called.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from flatout.agent.measuring import kernels
from flatout.agent.measuring.operator_places import OperatorPlaces
from flatout.agent.session import Session
from flatout.analysis.steps import running_anchor
from flatout.records.trial_result import Segment

AFTER = 3
"""Steps before the first look: by then the optimizer has its state."""
STEPS = 2
"""Steps that are looked at: shares of the time differ little from step to step."""
LOADING = "enumerate(DataLoader)#"
"""How torch begins the name of the span in which a loop waits for its loader."""


def start(session: Session, options: Mapping[str, Any]) -> "OperatorTimes":
    """Profile `options["steps"]` steps after the warm-up."""
    return OperatorTimes(session, options)


class OperatorTimes:
    """Adds up the operators' own times."""

    def __init__(self, session: Session, options: Mapping[str, Any]) -> None:
        self.session = session
        self.wanted = int(options.get("steps", STEPS))
        self.seen = 0
        self.steps = 0
        self.began = 0.0
        self.traced_ms = 0.0
        self.running: Any = None
        self.times: list[list[Any]] = []
        self.places = OperatorPlaces(session)
        self.has_looked = False
        kernels.watch()
        session.on("forward", self.saw_forward)
        session.on("segment", self.saw_segment)
        session.on("stop", self.places.leave)

    def saw_forward(self, *_: Any) -> None:
        """Begin to look at places with the first training call of the step before the profile."""
        if self.seen == AFTER - 1 and not self.has_looked:
            self.has_looked = True
            self.places.begin()

    def saw_segment(self, segment: Segment) -> None:
        """Begin and end the profile at the ends of steps."""
        if segment.who != running_anchor([each.who for each in self.session.segments]):
            return
        self.seen += 1
        if self.seen == AFTER:
            self.places.leave()
            self.begin()
        elif self.running is not None:
            self.steps += 1
            self.traced_ms = 1e3 * (time.perf_counter() - self.began)
            if self.steps == self.wanted:
                self.close()

    def begin(self) -> None:
        """Start torch's profiler, unless the script uses it: there can be only one."""
        from torch.autograd import profiler

        running: Any = profiler.profile(use_cpu=True)
        if not kernels.begin(running, self.give_way):
            return
        self.running = running
        self.began = time.perf_counter()

    def close(self) -> None:
        """End the profile and add its events up."""
        running, self.running = self.running, None
        if running is None:
            return
        running.__exit__(None, None, None)
        self.times = own_times(running.function_events)

    def give_way(self) -> None:
        """End before the script begins a profile of its own; a part of a step is no step."""
        if self.running is not None:
            self.steps = 0
            self.close()

    def result(self) -> Mapping[str, Any]:
        """Return calls and own milliseconds by operator; of whole steps only."""
        self.close()
        steps = self.steps
        return {
            "steps": steps,
            "traced_ms": self.traced_ms,
            "operators": self.times if steps else [],
            "places": self.places.result() if steps else [],
        }


def own_times(events: Iterable[Any]) -> list[list[Any]]:
    """Return name, calls and own milliseconds of the operators outside the loader.

    Spans that torch or the script name are no operators.
    """
    calls: dict[str, int] = defaultdict(int)
    own_us: dict[str, float] = defaultdict(float)
    for event in events:
        if "::" not in event.name or "#" in event.name or _is_loading(event):
            continue
        calls[event.name] += 1
        own_us[event.name] += event.self_cpu_time_total
    return [[name, calls[name], own_us[name] / 1e3] for name in own_us]


def _is_loading(event: Any) -> bool:
    while event is not None:
        if event.name.startswith(LOADING):
            return True
        event = event.cpu_parent
    return False
