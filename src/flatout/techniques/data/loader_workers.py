"""Load batches in worker processes.

What it does: sets `num_workers` and `prefetch_factor` of the training loaders, so that reading,
decoding and collating run beside the training step.
When it helps: the step waits for data while cores are free.
What it costs: memory per worker, shared memory for the batches in flight, and cores.
How it is checked: sample order and the trainer's random stream are bit-identical for every number
of workers above 0, and from 0 as long as the data set draws nothing from the global streams.
"""

import math
import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.core.errors import NotApplicable
from flatout.core.machine import Machine
from flatout.core.profile import LoaderFacts, Profile
from flatout.core.technique import Effect, Numerics, Technique

MIN_WAIT_SHARE = 0.02
"""Below this wait, free data could not give the 1.02x that a lever must show to be kept."""
SHM_FACTOR = 1.5
"""Shared memory to have free per byte in flight; workers are killed by SIGBUS when it runs out."""
DEFAULT_PREFETCH = 2
"""Torch's own `prefetch_factor`."""
COPY_MS_PER_MB = 1.2
"""CPU time to move a batch from a worker to the trainer, over the whole process tree: measured as
0.180 ms for a uint8 image of 0.15 MB and 0.723 ms for a float32 one of 0.60 MB."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWorkers(Technique):
    """Load batches in worker processes, beside the training step."""

    family: ClassVar[str] = "data"
    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    by_hand: ClassVar[str] = """
Where the training loader is made:
+ DataLoader(..., num_workers=$num_workers, prefetch_factor=$prefetch_factor)
"""

    num_workers: int = 2
    """Worker processes of each training loader."""
    prefetch_factor: int = DEFAULT_PREFETCH
    """Batches each worker holds ready."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers={self.num_workers} must be at least 1")
        if self.prefetch_factor < 1:
            raise ValueError(f"prefetch_factor={self.prefetch_factor} must be at least 1")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["LoaderWorkers"]:
        """Return up to three numbers of workers that cores and shared memory allow."""
        loaders = profile.training_loaders
        if not loaders or profile.share("data_wait") < MIN_WAIT_SHARE:
            return ()
        asked = next((x.prefetch_factor for x in loaders if x.prefetch_factor), DEFAULT_PREFETCH)
        return [
            cls(num_workers=workers, prefetch_factor=prefetch)
            for workers in worker_counts(profile, machine.usable_cores)
            for prefetch in [fitting_prefetch(loaders, workers, asked, machine.shm_free_bytes)]
            if prefetch
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Take the slowest of the step without data, the workers, and the cores they share."""
        step_ms = profile.step_ms.median
        rest_ms = step_ms - profile.phases_ms["data_wait"]
        cores = machine.usable_cores
        copied = sum(loader.batch_bytes for loader in profile.training_loaders)
        load_ms = fetch_per_step_ms(profile, cores)
        load_ms += COPY_MS_PER_MB * copied / 1e6 * profile.batches_per_step
        threads = max(1, profile.cpu_threads) if profile.device_kind == "cpu" else 1
        busy_ms = load_ms + rest_ms * min(threads, cores)
        after_ms = max(rest_ms, load_ms / self.num_workers, busy_ms / cores)
        return Effect(
            step_ms=after_ms - step_ms,
            why=f"{load_ms:.1f} ms of loading per step shared by {self.num_workers} workers",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Set the workers, unless the data set cannot live in several of them."""
        check_data_set(arguments, self.num_workers)
        return {
            **arguments,
            "num_workers": self.num_workers,
            "prefetch_factor": self.prefetch_factor,
        }


def fetch_per_step_ms(profile: Profile, cores: int) -> float:
    """Return the CPU time that loading a step's batches takes.

    Without workers the wait is the loading itself. With workers a loop that waits runs at their
    pace, so they are busy all the time, as far as there are cores for them.
    """
    now = _workers_now(profile)
    if now == 0:
        return profile.phases_ms["data_wait"]
    return profile.step_ms.median * min(now, cores)


def worker_counts(profile: Profile, cores: int) -> tuple[int, ...]:
    """Return the numbers of workers worth a trial: what the step needs, twice that, and the most.

    Where cores are short the most come first: the prediction sees no difference then, but later
    levers that shorten the step need them. The present number is left out. A data set that is
    iterable is repeated by every worker, so one worker is then all there is to try.
    """
    now = _workers_now(profile)
    if any(loader.is_iterable for loader in profile.training_loaders):
        return (1,) if now == 0 else ()
    rest_ms = max(profile.step_ms.median - profile.phases_ms["data_wait"], 1e-3)
    needed = math.ceil(fetch_per_step_ms(profile, cores) / rest_ms)
    first = min(max(1, needed), max(1, cores // 2))
    is_short = needed + max(1, profile.cpu_threads) > cores and profile.device_kind == "cpu"
    return tuple(sorted({first, min(2 * first, cores), cores} - {now}, reverse=is_short))


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


def check_data_set(arguments: Mapping[str, Any], workers: int) -> None:
    """Make sure that worker processes would load the same samples.

    Raises:
        NotApplicable: if they would repeat an iterable data set, or could not be started.
    """
    from torch.utils.data import IterableDataset

    dataset = arguments["dataset"]
    if isinstance(dataset, IterableDataset) and (workers > 1 or arguments.get("num_workers")):
        raise NotApplicable(
            "the data set is iterable: every worker repeats it unless it splits itself, "
            "so another number of workers is another training"
        )
    if start_method(arguments.get("multiprocessing_context")) == "fork":
        return
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        trouble = find_pickle_trouble(arguments.get(name))
        if trouble is not None:
            raise NotApplicable(f"worker processes are spawned here, and {name}: {trouble}")


def find_pickle_trouble(thing: Any) -> str | None:
    """Return why an object cannot be sent to a spawned worker, or None."""
    try:
        pickle.dumps(thing)
    except Exception as error:  # noqa: BLE001  pickling runs the user's code: anything may come
        return f"{type(error).__name__}: {error}"
    return None


def start_method(context: Any = None) -> str:
    """Return how worker processes start, without fixing the method for the script.

    Args:
        context: the loader's `multiprocessing_context`: a name, a context or None.
    """
    if isinstance(context, str):
        return context
    if context is not None:
        return str(context.get_start_method())
    # The first of all methods is the default; asking for it otherwise would settle it.
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def _workers_now(profile: Profile) -> int:
    return max((loader.workers for loader in profile.training_loaders), default=0)
