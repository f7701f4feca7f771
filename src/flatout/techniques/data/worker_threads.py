"""Let each loader worker compute with one thread.

What it does: in every worker process, switches off the threads that OpenCV, BLAS and OpenMP
libraries start on their own. Torch does so for its own threads in workers already.
When it helps: workers use more than one core each, so that several of them fight for the cores.
What it costs: a worker that had cores to itself is slower.
How it is checked: the samples are compared; sums in a BLAS product may round differently.
"""

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from flatout.analysis.feeding import cores_of, is_starved, worker_facts
from flatout.data.images.substitution import find_link
from flatout.records.errors import NotApplicable
from flatout.records.journey import WorkerFacts
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique

MORE_THAN_BUSY = 1.3
"""CPU time of a worker against the time in which it made batches: one thread gives 1 at most, plus
what it takes to send them."""
START_MS = 50.0
"""CPU time that the start of a worker takes longer: OpenBLAS, once told in a forked process, starts
a thread there that spins for 49 ms before it sleeps (measured); all else takes 7 ms."""
SWITCHES = {
    r"openblas": (
        "openblas_set_num_threads",
        "openblas_set_num_threads64_",
        "scipy_openblas_set_num_threads",
        "scipy_openblas_set_num_threads64_",
    ),
    r"libmkl_rt": ("MKL_Set_Num_Threads",),
    r"libblis": ("bli_thread_set_num_threads",),
    r"lib(gomp|omp|iomp)": ("omp_set_num_threads",),
}
"""Names of libraries, and of their functions that set the number of threads."""
VARIABLES = (
    "OPENCV_FOR_THREADS_NUM",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)
"""What libraries read when they are loaded or first used: `__getitem__` may import them late."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerThreads(Technique):
    """One native thread in each loader worker."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    by_hand: ClassVar[str] = """
Where the training loader is made:
+ from flatout.techniques.data.worker_threads import OneThread
+ DataLoader(..., worker_init_fn=OneThread(worker_init_fn))
"""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["WorkerThreads"]:
        """Return the technique where the step waits and workers use more than a core each."""
        return [cls()] if is_starved(profile) and threaded(profile) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the CPU time beyond one thread a worker to go, as far as cores are short."""
        facts = threaded(profile)
        start_ms = started_ms(profile, machine)
        if not facts:
            return Effect(step_ms=start_ms, why=_unneeded(profile))
        used = sum(x.user_share + x.system_share for x in facts)
        made = sum(x.busy_share for x in facts)
        short = min(1.0, used / cores_of(profile, machine))
        saved = (1 - made / used) * short
        return Effect(
            step_ms=start_ms - profile.phases_ms["data_wait"] * saved,
            why=f"{len(facts)} workers use {used:.1f} cores for {made:.1f} cores' time of batches",
        )

    def epoch(self, loader: Any) -> Any:
        """Have each worker limit its threads before the script's own start of a worker."""
        if not loader.num_workers:
            raise NotApplicable("the loader has no workers")
        if find_link(loader, OneThread) is None:
            loader.worker_init_fn = OneThread(loader.worker_init_fn)
        return loader


@dataclass(frozen=True, slots=True)
class OneThread:
    """A `worker_init_fn` that limits the threads, then does what the script asked for."""

    then: Callable[[int], None] | None = None

    def __call__(self, number: int) -> None:
        """Start a worker."""
        use_one_thread()
        if self.then is not None:
            self.then(number)


def use_one_thread() -> list[str]:
    """Limit this process's native libraries to one thread, those to come as well.

    Returns:
        What was limited of the libraries that are loaded.
    """
    os.environ |= dict.fromkeys(VARIABLES, "1")
    limited = []
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)
        limited.append("cv2")
    for path, names in _libraries():
        library = ctypes.CDLL(path)
        for name in names:
            with contextlib.suppress(AttributeError):
                getattr(library, name)(ctypes.c_int(1))
                limited.append(name)
    return limited


def threaded(profile: Profile) -> list[WorkerFacts]:
    """Return the workers that used clearly more CPU time than they made batches."""
    return [
        x
        for x in worker_facts(profile)
        if x.user_share + x.system_share > MORE_THAN_BUSY * max(x.busy_share, 0.1)
    ]


def started_ms(profile: Profile, machine: Machine) -> float:
    """Return what dearer starts of workers take of a step, where each epoch starts them again."""
    loaders = [x for x in profile.training_loaders if not x.persistent_workers]
    workers = max((x.workers for x in loaders), default=0)
    if not profile.epoch_steps or not profile.epoch_start_ms:
        return 0.0
    return START_MS * workers / min(workers or 1, cores_of(profile, machine)) / profile.epoch_steps


def _unneeded(profile: Profile) -> str:
    """Return why nothing is expected of it."""
    if worker_facts(profile):
        return "no worker uses clearly more than one core"
    return "no one looked at what the workers use: the step hardly waits for them"


def _libraries() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the loaded libraries that have threads of their own, with their functions."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return  # not Linux: OpenCV is limited all the same
    paths = {line.split(maxsplit=5)[5] for line in lines if ".so" in line and "/" in line}
    for path in sorted(paths):
        for pattern, names in SWITCHES.items():
            if re.search(pattern, path.rpartition("/")[2]):
                yield path, names


KOREAN = """
One native thread in each loader worker.
    로더 워커마다 네이티브 스레드를 하나만 씁니다.
{n} workers use {used} cores for {made} cores' time of batches
    워커 {n}개가 코어 {made}개로 만들 배치에 코어 {used}개를 씁니다
no worker uses clearly more than one core
    코어 하나를 뚜렷하게 넘겨 쓰는 워커가 없습니다
no one looked at what the workers use: the step hardly waits for them
    스텝이 워커를 거의 기다리지 않아, 워커가 무엇을 쓰는지 살펴보지 않았습니다
"""
