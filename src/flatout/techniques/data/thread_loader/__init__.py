"""Make the samples of a batch in threads of one worker process.

What it does: one worker process in place of several; inside it the samples of each batch are made
side by side in threads. Order, collation, pinning and the way errors arrive stay torch's own.
When it helps: many workers compete for memory or are slow to start, and what the samples do
(Pillow, simplejpeg, OpenCV, files) lets other threads run.
What it costs: a data set must bear several threads at once; that is looked at, not proved.
How it is checked: the first samples are bit-identical with those of one thread; each sample has
random streams of its own, so that no thread takes another's draws; the guard compares all batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from flatout.agent.worker_start import start_of
from flatout.analysis.feeding import (
    DEFAULT_PREFETCH,
    MIN_WAIT_SHARE,
    cores_of,
    fed_step_ms,
    loading,
    share_of,
    workers_now,
)
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique
from flatout.techniques.data.loader_workers import COPY_MS_PER_MB, check_data_set

MOST_THREADS = 8
"""Beyond some eight threads the interpreter's lock holds them up in what is Python itself (general
knowledge; 2 threads lost 3 % with simplejpeg and 14 % with Pillow, measured)."""
THREAD_COST = 1.14
"""CPU time of a sample made in threads over that in a worker: 3.82 against 3.42 ms and, in another
run, 4.08 against 3.52, each n=6, for Pillow and floats (suite input_pipeline): the lock is fought
for."""
RUN_SHARE = 0.8
"""Part of the threads that run at once: two made 400 images a second there, which is 1.63 cores'
CPU time; two workers made 562. Without floats, bytes from simplejpeg gained 8-14 %."""
HOLDING = ("python", "normalise", "collate")
"""Stages that hold the interpreter's lock for most of their time."""
USUAL_HOLDING = 0.3
"""Part of a classic pipeline that does, where no one looked."""
LEAST_GAIN = 1.2
"""How much faster than one thread they have to be: 1.0 where none lets the others run."""
MEASURED = 3
"""Times that both are timed; the best of each counts, so that other work does not."""
REFUSED = "_flatout_not_threaded"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadLoader(Technique):
    """Load batches in one process with several threads."""

    family: ClassVar[str] = "data"
    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    by_hand: ClassVar[str] = """
A loader with one worker whose data set makes its batches in a thread pool:
+ def __getitems__(self, indices):
+     return list(self.pool.map(self.__getitem__, indices))   # a pool of $threads threads
+ DataLoader(..., num_workers=1)
"""

    threads: int = 2
    """Threads that make the samples of one batch."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ThreadLoader"]:
        """Return as many threads as there are cores, where the loop waits for its batches."""
        loaders = [x for x in profile.training_loaders if not x.is_iterable]
        threads = min(machine.usable_cores, MOST_THREADS)
        if not loaders or threads < 2 or profile.share("data_wait") < MIN_WAIT_SHARE:
            return ()
        return [cls(threads=threads)]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect what as many workers would bring, less what the interpreter's lock takes.

        One process sends what its threads make, so the batches' way to the loop costs the same.
        """
        now, copy_ms = loading(profile, cores_of(profile, machine)), 0.0
        if not workers_now(profile):  # what is made in the loop was not sent yet
            copied = sum(loader.batch_bytes for loader in profile.training_loaders)
            copy_ms = COPY_MS_PER_MB * copied / 1e6 * profile.batches_per_step
        held = max(share_of(profile, *HOLDING, otherwise=USUAL_HOLDING), 1e-3)
        # What holds the lock runs in one thread at a time: that bounds what the others add.
        at_once = RUN_SHARE * min(self.threads, 1 / held)
        then = replace(now, cpu_ms=now.cpu_ms * THREAD_COST + copy_ms)
        after_ms = fed_step_ms(profile, machine, then, workers=at_once)
        return Effect(
            step_ms=after_ms - profile.step_ms.median,
            why=f"{then.cpu_ms:.1f} ms of loading per step by {at_once:.1f} threads at once",
        )

    def epoch(self, loader: Any) -> Any:
        """Prove once that threads give the same samples, and let them make the batches."""
        return load_in_threads(loader, self.threads)


def load_in_threads(loader: Any, threads: int) -> Any:
    """Let one worker process of a `DataLoader` make the samples of each batch in threads.

    The first samples are made both ways in forked copies of the process and compared. Call it
    before the loader is first iterated.

    Raises:
        NotApplicable: if the data set cannot be shared by threads, gave other samples, or does not
            let other threads run.
    """
    from flatout.techniques.data.thread_loader.batch_threads import ThreadedCollate, find_threads

    if find_threads(loader.collate_fn) is not None:
        return loader
    if REFUSED not in loader.__dict__:
        loader.__dict__[REFUSED] = _find_trouble(loader, threads)
    if loader.__dict__[REFUSED]:
        raise NotApplicable(loader.__dict__[REFUSED])
    context, before = start_of(loader), loader.num_workers
    loader.collate_fn = ThreadedCollate(loader.collate_fn, threads)
    loader.num_workers = 1
    loader.multiprocessing_context = context
    loader.prefetch_factor = (loader.prefetch_factor or DEFAULT_PREFETCH) * max(1, before)
    return loader


def _find_trouble(loader: Any, threads: int) -> str:
    from flatout.data.proof.batches import can_be_compared, compare_ways, first_batch
    from flatout.techniques.data.thread_loader.batch_threads import (
        ThreadedCollate,
        find_unshareable,
    )

    trouble = can_be_compared(loader) or find_unshareable(loader.dataset)
    if trouble or loader.batch_sampler is None:
        return trouble or "the loader gives single samples, so there is no batch to share"
    check_data_set({"dataset": loader.dataset, "num_workers": loader.num_workers}, 1)
    alone = ThreadedCollate(loader.collate_fn, 1)
    proof = compare_ways(
        lambda: first_batch(loader, alone), lambda: _first_in_threads(loader, threads)
    )
    moved, gain = proof.facts or ("", 0.0)
    if moved:
        return f"samples draw from {moved}"
    if proof.trouble or gain >= LEAST_GAIN:
        return proof.trouble
    return f"{threads} threads are {gain:.2f} times as fast as one: they do not let each other run"


def _first_in_threads(loader: Any, threads: int) -> tuple[Any, Any]:
    """Make the first batch in threads; tell which shared stream moved, and what threads gain."""
    from flatout.data.proof.batches import first_indices, make_batch
    from flatout.techniques.data.thread_loader.batch_threads import (
        SharedStreams,
        ThreadedCollate,
        times_faster,
    )

    indices = first_indices(loader)
    alone, together = (ThreadedCollate(loader.collate_fn, n) for n in (1, threads))
    streams = SharedStreams()
    batch = make_batch(loader, indices, together)
    moved = streams.find_moved()
    if moved:
        return batch, [moved, 0.0]
    gain = times_faster(
        lambda: make_batch(loader, indices, alone),
        lambda: make_batch(loader, indices, together),
        rounds=MEASURED,
    )
    return batch, [moved, gain]
