"""Let loader workers give way to the training where cores are short.

What it does: lowers the priority of every worker process (its nice value, as `nice` does).
When it helps: workers and the training want more cores than there are. At the same priority the
training is put off in the middle of a step, and its threads wait for the one that has no core.
What it costs: batches come later; a training of one thread on the CPU loses by that. Alongside
other programs on the machine the workers get less. How it is checked: samples and their order
are the same, bit for bit.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.analysis.feeding import workers_now
from flatout.data.images.substitution import find_link
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique
from flatout.techniques.compute.cpu_threads import CROWDED_SHARE

LAST = 19
"""The lowest priority there is: POSIX's NZERO - 1."""
KEPT_PART = 0.5
"""Of what threads no longer wait for a core: workers that get less make the loop wait for batches,
3 % of the step before and 31 % after, at 1.21 times the pace (measured, 2 cores, 2 threads)."""
WAITS_MORE = 0.5
"""The same for one thread, which loses: 0.87 of the pace where it waited a quarter of the time."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNiceness(Technique):
    """A lower priority for loader workers than for the training."""

    family: ClassVar[str] = "data"
    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait", "forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    by_hand: ClassVar[str] = """
Where the training loader is made:
+ DataLoader(..., worker_init_fn=lambda worker: os.nice($niceness))
"""

    niceness: int = 5
    """What is added to the nice value; each step makes the share of a busy core a fifth smaller."""

    def __post_init__(self) -> None:
        if not 1 <= self.niceness <= LAST:
            raise ValueError(f"niceness={self.niceness} must be from 1 to {LAST}")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["WorkerNiceness"]:
        """Return the technique where workers delay a training on threads or on a device."""
        del machine
        is_crowded = profile.delay_share > CROWDED_SHARE and workers_now(profile)
        # One thread on a CPU waits for no one but the workers' batches, which would come later.
        is_one = profile.device_kind == "cpu" and profile.cpu_threads <= 1
        return [cls()] if is_crowded and not is_one and hasattr(os, "nice") else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """End the training's own waits for a core; half of that comes back as waits for batches."""
        workers = workers_now(profile)
        threads = max(1, profile.cpu_threads) if profile.device_kind == "cpu" else 1
        if not workers or profile.delay_share <= CROWDED_SHARE:
            return Effect(why="nobody takes cores from the training")
        waited = profile.delay_share / (threads + workers)
        if threads == 1 and profile.device_kind == "cpu":
            lost = WAITS_MORE * min(waited, 1.0)
            return Effect(
                step_ms=profile.step_ms.median * lost, why="one thread only waits for its batches"
            )
        return Effect(
            step_ms=-profile.step_ms.median * min(waited, 1.0) * KEPT_PART,
            why=f"each thread waits for a core {waited:.0%} of the time, beside {workers} workers",
        )

    def epoch(self, loader: Any) -> Any:
        """Have each worker step back before the script's own start of a worker."""
        if not loader.num_workers:
            raise NotApplicable("the loader has no workers")
        if not hasattr(os, "nice"):
            raise NotApplicable("processes have no nice value on this system")
        if find_link(loader, StepBack) is None:
            wanted = min(own_niceness() + self.niceness, LAST)
            loader.worker_init_fn = StepBack(wanted, loader.worker_init_fn)
        return loader


@dataclass(frozen=True, slots=True)
class StepBack:
    """A `worker_init_fn` that lowers the priority, then does what the script asked for."""

    wanted: int
    """The nice value that a worker ends up with, however often it is started again."""
    then: Callable[[int], None] | None = None

    def __call__(self, number: int) -> None:
        """Start a worker."""
        os.nice(max(0, self.wanted - own_niceness()))
        if self.then is not None:
            self.then(number)


def own_niceness() -> int:
    """Return this thread's nice value: 0 is usual, 19 gives way to all others."""
    return os.getpriority(os.PRIO_PROCESS, 0)
