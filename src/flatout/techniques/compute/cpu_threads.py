"""Set the number of threads that torch computes with on the CPU.

What it does: sets the threads of one operation: torch's, OpenMP's and MKL's.
When it helps: more threads than cores wait for each other; with loader workers, fewer threads
leave cores for them.
What it costs: nothing.
How it is checked: gradients match up to rounding: another number of threads sums otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    Numerics,
    RunningTraining,
    SourceForm,
    Switch,
    Technique,
)

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What OpenMP and MKL read when they are loaded."""
CROWDED_SHARE = 0.05
"""Waiting for a core above this share is not noise: undisturbed trials show at most 0.038
(measured, 112 A/A processes)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CpuThreads(Technique):
    """Compute with as many threads as there are free cores."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    sets: ClassVar[tuple[str, ...]] = ("threads",)
    by_hand: ClassVar[str] = """
At the start of the script:
+ torch.set_num_threads($threads)
"""

    source: ClassVar[SourceForm | None] = SourceForm(start="torch.set_num_threads($threads)")

    threads: int = 1
    """Threads of one operation."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["CpuThreads"]:
        """Return the free cores, and those left by loader workers when cores are short."""
        if profile.device_kind != "cpu" or not profile.cpu_threads:
            return ()
        cores = min(machine.physical_cores, machine.usable_cores)
        workers = max((x.workers for x in profile.training_loaders), default=0)
        is_crowded = profile.delay_share > CROWDED_SHARE
        wanted = {cores} if is_crowded or cores > profile.cpu_threads else set()
        if workers and is_crowded:
            wanted.add(max(1, cores - workers))
        return [cls(threads=n) for n in sorted(wanted - {profile.cpu_threads}, reverse=True)]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Scale the computation by the threads that find a core, or end the wait for cores."""
        step_ms = profile.step_ms.median
        cores = min(machine.physical_cores, machine.usable_cores)
        now = max(1, profile.cpu_threads)
        if self.threads > now or profile.delay_share <= CROWDED_SHARE:
            compute_ms = step_ms * profile.share("forward", "backward", "optimizer")
            gained = min(self.threads, cores) / min(now, cores)
            return Effect(
                step_ms=-compute_ms * (1 - 1 / gained),
                why=f"{self.threads} threads instead of {now} on {cores} cores",
            )
        return Effect(
            # The wait is summed over the threads: each of them loses its part of the step.
            step_ms=-step_ms * min(1.0, profile.delay_share / now),
            why=f"threads wait for a core {profile.delay_share:.2f} s per second",
        )

    def environment(self, variables: Mapping[str, str]) -> Mapping[str, str]:
        """Set the variables that OpenMP and MKL read when they are loaded."""
        return {**variables, **dict.fromkeys(VARIABLES, str(self.threads))}

    def start(self) -> None:
        """Set torch's threads: it does not follow the variables everywhere."""
        set_threads(self.threads)

    def switch(self, training: RunningTraining) -> Switch:
        """Set torch's threads, and put them back as they were."""
        import torch

        before = torch.get_num_threads()
        if before == self.threads:
            raise NotApplicable(f"the training has {before} threads already")
        return Switch(turn=lambda is_on: set_threads(self.threads if is_on else before))


def set_threads(threads: int) -> None:
    """Set the threads of one operation in this process, before the first parallel operation."""
    import torch

    torch.set_num_threads(threads)


def threads_per_rank(machine: Machine, ranks: int, workers_per_rank: int = 0) -> int:
    """Return the threads for each of several training processes on one machine, at least 1.

    >>> from flatout.records.machine import Device
    >>> cpu = Device(kind="cpu", name="", memory_bytes=0)
    >>> machine = Machine(device=cpu, logical_cores=64, usable_cores=64, physical_cores=32,
    ...     memory_bytes=0, shm_free_bytes=0)
    >>> threads_per_rank(machine, 8), threads_per_rank(machine, 8, workers_per_rank=3)
    (4, 1)
    """
    cores = min(machine.physical_cores, machine.usable_cores)
    return max(1, cores // ranks - workers_per_rank)


KOREAN = """
Compute with as many threads as there are free cores.
    비어 있는 코어 수만큼의 스레드로 계산합니다.
{n} threads instead of {now} on {cores} cores
    코어 {cores}개에서 스레드를 {now}개 대신 {n}개 씁니다
threads wait for a core {seconds} s per second
    스레드들이 1초에 {seconds} s씩 코어를 기다립니다
the training has {n} threads already
    학습이 이미 스레드 {n}개를 쓰고 있습니다
"""
