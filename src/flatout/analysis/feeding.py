"""What feeding a step takes, and what the step would be if it took less. Pure; from a profile.

Making batches and training share the cores: where workers make them, the step is as long as the
slowest of three: what the loop does on its own, one worker's part of the loading, and all that the
cores have to do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.records.journey import TRAINING, WORKERS, WorkerFacts
from flatout.records.machine import Machine
from flatout.records.profile import LEAST_LEFT, LoaderFacts, Profile

MADE = ("read", "decode", "collate")
"""Legs of the journey that making a batch consists of."""
SENT = ("transport", "copy")
"""Stages of a sample that come after it was made."""
EXACTLY = 1e-6
"""Two workers and this much of a third are two: sums of times are not exact."""
MIN_WAIT_SHARE = 0.02
"""Below this wait, free data could not give the 1.02x that a technique must show to be kept."""
SHM_FACTOR = 1.5
"""Shared memory to have free per byte in flight; workers are killed by SIGBUS when it runs out."""
DEFAULT_PREFETCH = 2
"""Torch's own `prefetch_factor`."""
MOST_PER_CORE, MOST_PER_CORE_BLOCKED = 4, 16
"""Workers at most for a core, and where they wait for storage or a lock for most of the time: each
needs its memory."""
MEMORY_SHARE = 0.5
"""Share of the host's memory that all workers together may come to hold."""
MIN_DELAY_SHARE = 0.10
"""Threads that wait for a core for a tenth of the time are too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What making the batches of one step takes, over all processes that make them."""

    cpu_ms: float
    blocked_ms: float = 0.0
    """Waiting for storage or a lock: it needs a worker, but no core."""

    @property
    def total_ms(self) -> float:
        """Time that making a step's batches takes, over all processes."""
        return self.cpu_ms + self.blocked_ms

    @property
    def is_blocked(self) -> bool:
        """Whether most of it is waiting: then more workers help than there are cores."""
        return self.blocked_ms > self.cpu_ms


def loading(profile: Profile, cores: int) -> Loading:
    """Return what loading a step's batches takes, from the journey where it was followed.

    Without it: without workers the wait is the loading itself, and with workers a loop that waits
    runs at their pace, so they are busy all the time, as far as there are cores for them.
    """
    now = workers_now(profile)
    legs = _made_legs(profile)
    if legs and (now == 0 or worker_facts(profile)):
        blocked_ms = legs.get("read", 0.0)
        cpu_ms = sum(legs.values()) - blocked_ms
        used_ms = sum(x.user_share + x.system_share for x in worker_facts(profile))
        # The legs hold waits for a core, the shares what was sent: the smaller one is the work.
        if now:
            cpu_ms = min(cpu_ms, used_ms * profile.step_ms.median)
        return Loading(cpu_ms=cpu_ms, blocked_ms=blocked_ms)
    if now == 0:
        return Loading(cpu_ms=profile.phases_ms["data_wait"])
    return Loading(cpu_ms=profile.step_ms.median * min(now, cores))


def cores_of(profile: Profile, machine: Machine) -> int:
    """Return the cores for one rank: what affinity and quota leave, shared by the ranks here."""
    return max(1, machine.usable_cores // max(1, len(profile.ranks)))


def _made_legs(profile: Profile) -> dict[str, float]:
    """Return the milliseconds per step of making batches, of workers where there are any."""
    legs = profile.journey.legs if profile.journey else ()
    where = WORKERS if workers_now(profile) else TRAINING
    return {leg.name: leg.ms for leg in legs if leg.where == where and leg.name in MADE}


def worker_facts(profile: Profile) -> list[WorkerFacts]:
    """Return the facts on the worker processes, without those on the training process."""
    workers = profile.journey.workers if profile.journey else ()
    return [facts for facts in workers if facts.number >= 0]


def workers_now(profile: Profile) -> int:
    """Return the workers behind the training's batches."""
    return max((loader.workers for loader in profile.training_loaders), default=0)


def useful_workers(profile: Profile, machine: Machine) -> int:
    """Return the most loader workers that can help; every advice on workers goes by this number.

    As many as make a step's batches while the rest of the step runs, but no more than keep all
    cores busy: a worker that waits for storage or a lock needs none meanwhile.
    """
    cores, step_ms = cores_of(profile, machine), profile.step_ms.median
    load, now = loading(profile, cores), workers_now(profile)
    made_ms = load.total_ms
    per_core = made_ms / load.cpu_ms if load.cpu_ms else math.inf
    # A loop that waits runs at the pace of its workers, so they are busy all the time.
    rest_ms = max(step_ms - profile.phases_ms["data_wait"], LEAST_LEFT * step_ms)
    wanted = max(made_ms, now * step_ms) / rest_ms
    if profile.pipeline is not None:
        pipeline = profile.pipeline
        waited_ms = sum(stage.wait_ms for stage in pipeline.stages)
        if not load.blocked_ms:
            per_core = 1 + waited_ms / pipeline.cpu_ms if pipeline.cpu_ms else math.inf
        made = pipeline.cpu_ms + waited_ms
        wanted = max(wanted, pipeline.samples_per_s * made / 1e3)
    return max(1, math.ceil(min(wanted, cores * per_core) - EXACTLY))


def fed_change_ms(
    profile: Profile, machine: Machine, *, saved_share: float = 0.0, saved_blocked: float = 0.0
) -> float:
    """Return how the step changes when parts of the loading are saved; negative.

    `saved_share` is the part of its CPU time, `saved_blocked` that of its waiting for storage.
    """
    cores, step_ms = cores_of(profile, machine), profile.step_ms.median
    wait_ms, workers = profile.phases_ms["data_wait"], workers_now(profile)
    now = loading(profile, cores)
    then = Loading(
        cpu_ms=now.cpu_ms * (1 - saved_share), blocked_ms=now.blocked_ms * (1 - saved_blocked)
    )
    rest_ms = max(0.0, step_ms - wait_ms)
    if workers:
        # Where the loop waits the workers' way is the longest: what becomes of it is taken relative
        # to the step that was measured, whatever slows them.
        shortened = _way_ms(profile, cores, then) / max(_way_ms(profile, cores, now), 1e-9)
        after_ms = max(rest_ms, step_ms * shortened)
    else:
        # A look at samples on their own may take longer than the loop was seen to wait.
        shortened = then.total_ms / max(now.total_ms, 1e-9)
        after_ms = rest_ms + wait_ms * shortened
    # A profile whose loading takes longer than it waits would promise more than the wait.
    return max(after_ms - step_ms, -wait_ms)


def _way_ms(profile: Profile, cores: int, load: Loading) -> float:
    """Return the longer of one worker's part of the loading, and all that the cores have to do."""
    rest_ms = max(0.0, profile.step_ms.median - profile.phases_ms["data_wait"])
    threads = max(1, profile.cpu_threads) if profile.device_kind == "cpu" else 1
    all_ms = load.cpu_ms + rest_ms * min(threads, cores)
    return max(load.total_ms / workers_now(profile), all_ms / cores)


def share_of(profile: Profile, *stages: str, otherwise: float) -> float:
    """Return the part of a sample's making that some stages take.

    `otherwise`: what is taken for it where no one looked.
    """
    pipeline = profile.pipeline
    if pipeline is None:
        return otherwise
    made = {x.name: x.cpu_ms for x in pipeline.stages if x.name not in SENT}
    total = sum(made.values())
    return sum(made.get(name, 0.0) for name in stages) / total if total else otherwise


def is_starved(profile: Profile) -> bool:
    """Return whether the step waits for its batches visibly."""
    return profile.share("data_wait") >= MIN_WAIT_SHARE


def is_crowded(profile: Profile) -> bool:
    """Return whether a training on the CPU has to share its cores with idle workers."""
    is_late = profile.delay_share >= MIN_DELAY_SHARE and profile.device_kind == "cpu"
    busy = [x.busy_share for x in worker_facts(profile)]
    return is_late and len(busy) > 1 and sum(busy) < len(busy) / 2


def fitting_prefetch(
    loaders: Sequence[LoaderFacts], workers: int, wanted: int, shm_free_bytes: int
) -> int:
    """Return the largest `prefetch_factor` up to the wanted one that /dev/shm holds; 0 for none.

    >>> facts = dict(address="a", is_training=True, dataset="D", dataset_len=9, batch_size=4,
    ...     num_workers=0, pin_memory=False, persistent_workers=False, prefetch_factor=None)
    >>> loaders = [LoaderFacts(**facts, batch_bytes=10_000_000)]
    >>> [fitting_prefetch(loaders, 2, 4, free) for free in (10**9, 64 * 2**20, 2 * 10**7)]
    [4, 2, 0]
    """
    one_each = SHM_FACTOR * sum(loader.batch_bytes for loader in loaders) * workers
    if not one_each:
        return wanted
    return min(wanted, int(shm_free_bytes / one_each))
