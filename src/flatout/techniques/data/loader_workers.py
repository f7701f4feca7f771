"""Load batches in worker processes.

What it does: sets `num_workers` and `prefetch_factor` of the training loaders, so that reading,
decoding and collating run alongside the training step.
When it helps: the step waits for data while cores are free.
What it costs: memory per worker, shared memory for the batches in flight, and cores.
How it is checked: sample order and the trainer's random stream are bit-identical for every number
of workers above 0, and from 0 as long as the data set draws nothing from the global streams. Where
an epoch is left early, a sampler that draws as it goes has drawn more the more workers there are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.agent.worker_start import REASON, start_with
from flatout.analysis.feeding import (
    DEFAULT_PREFETCH,
    MEMORY_SHARE,
    MOST_PER_CORE_BLOCKED,
    cores_of,
    fitting_prefetch,
    is_crowded,
    is_starved,
    loading,
    worker_facts,
    workers_now,
)
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, SourceForm, Technique, process_state

COPY_MS_PER_MB = 1.2
"""CPU time to move a batch from a worker to the trainer, over the whole process tree: measured as
0.180 ms for a uint8 image of 0.15 MB and 0.723 ms for a float32 one of 0.60 MB."""

CLEAR = 1.15
"""On the CPU a scan that shows less proves nothing against workers: they may need the training's
threads to leave them a core, and only both techniques together help."""
KEEPS_UP_SHARE = 0.85
"""Workers that are idle for more than a seventh of the time wait for the loop, not it for them."""
UNEVEN_GAIN = 0.5
"""Share of the wait that twice the prefetch is hoped to hide; assumed, the trial decides."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWorkers(Technique):
    """Load batches in worker processes, alongside the training step."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    sets: ClassVar[tuple[str, ...]] = ("num_workers",)
    by_hand: ClassVar[str] = """
Where the training loader is made:
+ DataLoader(..., num_workers=$num_workers, prefetch_factor=$prefetch_factor)
Where flatout says that it forks or spawns them instead: multiprocessing_context="fork" or "spawn".
"""
    source: ClassVar[SourceForm | None] = SourceForm(
        loader={"num_workers": "$num_workers", "prefetch_factor": "$prefetch_factor"}
    )

    num_workers: int = 2
    """Worker processes of each training loader."""
    prefetch_factor: int = DEFAULT_PREFETCH
    """Batches each worker holds ready."""
    chosen: list[str] = process_state(list)
    """Why workers start as they do, where flatout chose that."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers={self.num_workers} must be at least 1")
        if self.prefetch_factor < 1:
            raise ValueError(f"prefetch_factor={self.prefetch_factor} must be at least 1")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["LoaderWorkers"]:
        """Return the few settings that this profile speaks for, within cores and memory."""
        loaders = profile.training_loaders
        if not loaders or not (is_starved(profile) or is_crowded(profile)):
            return ()
        asked = next((x.prefetch_factor for x in loaders if x.prefetch_factor), DEFAULT_PREFETCH)
        wanted = [(n, asked) for n in worker_counts(profile, machine)]
        if is_uneven(profile):
            wanted.insert(0, (workers_now(profile), 2 * asked))
        found = [
            cls(num_workers=workers, prefetch_factor=fitting)
            for workers, prefetch in wanted
            for fitting in [fitting_prefetch(loaders, workers, prefetch, machine.shm_free_bytes)]
            if fitting
        ]
        return list(dict.fromkeys(found))

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Take the slowest of the step without data, the workers, and the cores they share."""
        step_ms = profile.step_ms.median
        rest_ms = step_ms - profile.phases_ms["data_wait"]
        cores, now = cores_of(profile, machine), workers_now(profile)
        if self.num_workers == now:
            return Effect(
                step_ms=-UNEVEN_GAIN * profile.phases_ms["data_wait"],
                why="the workers keep up on average: more batches ready outlast the slow ones",
            )
        scan = profile.worker_scan
        seen = scan.ratio(self.num_workers, than=now) if scan else math.nan
        if not math.isnan(seen) and is_telling(profile):
            return Effect(
                step_ms=step_ms * (1 / seen - 1),
                why=f"the running training was {seen:.2f}x as fast with {self.num_workers} workers",
            )
        if not is_starved(profile):
            return Effect(
                step_ms=-step_ms * profile.delay_share * (1 - self.num_workers / max(1, now)),
                why=f"threads wait for a core {profile.delay_share:.0%} of the time, next to {now}"
                " workers that are idle for most of it",
            )
        copied = sum(loader.batch_bytes for loader in profile.training_loaders)
        copy_ms = COPY_MS_PER_MB * copied / 1e6 * profile.batches_per_step
        load = loading(profile, cores)
        threads = max(1, profile.cpu_threads) if profile.device_kind == "cpu" else 1
        busy_ms = load.cpu_ms + copy_ms + rest_ms * min(threads, cores)
        each_ms = (load.cpu_ms + load.blocked_ms + copy_ms) / self.num_workers
        after_ms = max(rest_ms, each_ms, busy_ms / cores)
        return Effect(
            step_ms=after_ms - step_ms,
            why=(
                f"{load.cpu_ms + load.blocked_ms + copy_ms:.1f} ms of loading per step shared by "
                f"{self.num_workers} workers"
            ),
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Set the workers and how they start, unless the data set cannot live in them."""
        check_data_set(arguments, self.num_workers)
        started = start_with(arguments)
        reason = getattr(started.get("multiprocessing_context"), REASON, "")
        if reason:
            self.chosen.append(reason)
        return {**started, "num_workers": self.num_workers, "prefetch_factor": self.prefetch_factor}

    def end(self) -> str:
        """Say where and why the workers were started in another way than is usual here."""
        return "; ".join(dict.fromkeys(self.chosen))


def worker_counts(profile: Profile, machine: Machine) -> tuple[int, ...]:
    """Return the numbers of workers worth a trial; the present one is left out.

    Where the running training was seen with several, the best of them; and where that does not tell
    enough, then the first of what is to be expected as well. Where no one looked, all of that:
    what the step needs by its own profile, twice that, and the most that the cores feed.
    Once a number was kept, its neighbours: a quarter more and a quarter less. Where cores are short
    the most come first: the prediction sees no difference then, but later techniques that
    shorten the step need them. An iterable data set is repeated by every worker: one is all
    there is to try.
    """
    now = workers_now(profile)
    if any(loader.is_iterable for loader in profile.training_loaders):
        return (1,) if now == 0 else ()
    scan = profile.worker_scan
    if scan is None:
        return _expected_counts(profile, machine)
    best = scan.best.num_workers
    seen = (best,) if best not in (0, now) else ()
    if is_telling(profile):
        return seen
    return tuple(dict.fromkeys((*seen, *_expected_counts(profile, machine)[:1])))


def is_telling(profile: Profile) -> bool:
    """Return whether a scan says which numbers are worth a trial, and which are not."""
    scan = profile.worker_scan
    if scan is None:
        return False
    # Workers with fewer threads alongside them were seen as well: that is the other half of the
    # cores.
    if scan.with_threads:
        return True
    best = scan.ratio(scan.best.num_workers, than=scan.now)
    return profile.device_kind != "cpu" or best >= CLEAR


def _expected_counts(profile: Profile, machine: Machine) -> tuple[int, ...]:
    now, cores = workers_now(profile), cores_of(profile, machine)
    rest_ms = max(profile.step_ms.median - profile.phases_ms["data_wait"], 1e-3)
    load = loading(profile, cores)
    needed = math.ceil((load.cpu_ms + load.blocked_ms) / rest_ms)
    most = most_workers(profile, machine)
    if is_ours(profile):
        apart = max(1, now // 4)
        wanted = {now + apart, now - apart}
    else:
        first = min(max(1, needed), max(1, most // 2))
        wanted = {first, min(2 * first, most), most}
    is_short = needed + max(1, profile.cpu_threads) > cores and profile.device_kind == "cpu"
    fewer = not is_starved(profile)
    kept = {n for n in wanted if 1 <= n <= most and (n < now or not fewer)} - {now}
    return tuple(sorted(kept, reverse=is_short))


def most_workers(profile: Profile, machine: Machine) -> int:
    """Return how many workers the cores can feed and the memory can hold.

    A worker that is blocked half of its time leaves its core to another one.
    """
    cores = cores_of(profile, machine)
    load = loading(profile, cores)
    whole_ms = load.cpu_ms + load.blocked_ms
    blocked_share = load.blocked_ms / whole_ms if whole_ms else 0.0
    most = round(cores / max(1 - blocked_share, 1 / MOST_PER_CORE_BLOCKED))
    sizes = [x.pss_bytes for x in worker_facts(profile) if x.pss_bytes]
    if sizes:
        room = MEMORY_SHARE * machine.memory_bytes / max(1, len(profile.ranks))
        most = min(most, int(room / (sum(sizes) / len(sizes))))
    return max(1, most)


def is_uneven(profile: Profile) -> bool:
    """Return whether the workers keep up on average and the step waits all the same."""
    busy = [x.busy_share for x in worker_facts(profile)]
    return bool(busy) and is_starved(profile) and sum(busy) / len(busy) < KEEPS_UP_SHARE


def is_ours(profile: Profile) -> bool:
    """Return whether the present number of workers is not the script's own but a technique's."""
    return any(
        x.effective_workers not in (None, 0, x.num_workers) for x in profile.training_loaders
    )


def check_data_set(arguments: Mapping[str, Any], workers: int) -> None:
    """Make sure that worker processes would load the same samples, in later epochs as well."""
    from torch.utils.data import IterableDataset

    from flatout.data.proof.dataset_facts import goes_on
    from flatout.data.proof.random_streams import generators_of

    dataset, has_workers = arguments["dataset"], bool(arguments.get("num_workers"))
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream and (workers > 1 or has_workers):
        raise NotApplicable(
            "the data set is iterable: every worker repeats it unless it splits itself, "
            "so another number of workers is another training"
        )
    may_go_on = not has_workers and (is_stream or bool(generators_of(dataset)))
    if may_go_on and goes_on(dataset, list):
        raise NotApplicable(
            "the data set goes on from epoch to epoch by what it holds, as a random number "
            "generator of its own: its copies in workers would begin again in each"
        )


KOREAN = """
Load batches in worker processes, alongside the training step.
    학습 스텝과 동시에 워커 프로세스에서 배치를 읽습니다.
Where flatout says that it forks or spawns them instead: multiprocessing_context="fork" or "spawn".
    flatout이 fork나 spawn으로 바꾼다고 알리면 multiprocessing_context="fork"나 "spawn"을 줍니다.
the workers keep up on average: more batches ready outlast the slow ones
    워커들이 평균적으로는 따라가므로, 배치를 더 많이 준비해 두면 느린 배치를 넘길 수 있습니다
the running training was {ratio}x as fast with {n} workers
    학습이 도는 동안 워커를 {n}개로 바꾸니 속도가 {ratio}배였습니다
threads wait for a core {share} of the time, next to {now} workers that are idle for most of it
    대부분 놀고 있는 워커 {now}개 옆에서 스레드들이 시간의 {share}를 코어를 기다리며 보냅니다
{ms} ms of loading per step shared by {n} workers
    스텝마다 {ms} ms인 데이터 로딩을 워커 {n}개가 나누어 합니다
the data set is iterable: every worker repeats it unless it splits itself, so another number of
workers is another training
    이터러블 데이터셋은 스스로 나누지 않으면 워커마다 되풀이되므로 워커 수가 바뀌면 다른 학습이
    됩니다
the data set goes on from epoch to epoch by what it holds, as a random number generator of its own:
its copies in workers would begin again in each
    데이터셋이 자체 난수 생성기처럼 들고 있는 것으로 에폭을 이어 가는데, 워커의 사본은 에폭마다
    처음부터 다시 시작합니다
"""
