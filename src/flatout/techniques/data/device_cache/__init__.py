"""Keep a small data set on the device and pick its batches there.

What it does: puts the whole set into the device's memory once and picks the rows of each batch with
one `index_select`, in the order that the loader's own sampler draws, as early as the workers that
it replaces would have it drawn. On a CPU training the device is host memory: what is saved is a
call for each sample, collating and the workers. Once the script changes its data set, the loader
makes its batches as the script asked.
When it helps: a small set (a `TensorDataset`, or samples that are the same each time) whose loading
or copying shows in the step.
What it costs: memory for the set on the device.
How it is checked: batches, their order and the trainer's random stream are bit-identical.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, final
from weakref import WeakSet

from flatout.agent.nested import map_leaves
from flatout.agent.training_device import batch_device
from flatout.analysis.feeding import MIN_WAIT_SHARE, loading
from flatout.data.caching import free_memory_bytes, local_ranks
from flatout.data.proof import aliases
from flatout.data.proof.changes import ChangeWatch
from flatout.data.proof.dataset_facts import DatasetFacts, examine
from flatout.data.proof.sampler_draws import check_sampler, drawn_early
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique, process_state
from flatout.techniques.data.device_cache.resident_dataset import Resident, collate_whole

PICK_MS_PER_MB = 0.12
"""0.021-0.025 ms to gather a row of 0.197 MB (research on the input pipeline, one core)."""
COPIED_BYTES_PER_S = 1e9
"""At which a set in memory is copied once; assumed, the slowest of the hosts seen has more."""
IN_MEMORY = "TensorDataset"
USUAL_PREFETCH = 2
"""Batches a worker makes ahead where the script says nothing; torch's documentation."""
KEPT = "_flatout_resident"
"""Attribute of a loader in which `batches_on_device` keeps the set from epoch to epoch."""
START_US = 60.0
"""Time of a batch's few torch calls, whatever its size."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCache(Technique):
    """Keep the whole set on the device and pick batches there."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait", "h2d"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    stages: ClassVar[tuple[str, ...]] = ("python", "collate", "transport", "copy")
    keeps_samples: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
In place of the training loader, for a set that fits:
+ from flatout.techniques.data.device_cache import batches_on_device
+ for batch in batches_on_device(loader, device):
"""

    memory_share: float = 0.4
    """Share of the device's free memory that the set may take."""
    make_s: float = 30.0
    """Longest time to make all samples once."""
    residents: DatasetFacts[Resident] = process_state(DatasetFacts)
    """Sets that are kept, each where it was used last."""
    watches: WeakSet[ChangeWatch] = process_state(WeakSet)
    """Of the data sets that this process keeps."""

    def __post_init__(self) -> None:
        if not 0 < self.memory_share <= 0.9:
            raise ValueError(f"memory_share={self.memory_share} must be above 0 and at most 0.9")
        if self.make_s <= 0:
            raise ValueError(f"make_s={self.make_s} must be above 0")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["DeviceCache"]:
        """Return the technique where data or copies show in the step and the set fits as well."""
        loaders = profile.training_loaders
        if len(loaders) != 1 or profile.share("data_wait", "h2d") < MIN_WAIT_SHARE:
            return ()
        if loaders[0].is_iterable or not loaders[0].dataset_len or loaders[0].persistent_workers:
            return ()
        is_random = profile.pipeline is not None and profile.pipeline.is_repeated is False
        if is_random or making_s(profile, machine) > cls().make_s:
            return ()
        free = machine.device.memory_bytes - profile.peak_bytes.device
        return [cls()] if set_bytes(profile) <= cls().memory_share * free else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Take waiting and copying away, and put the picking in their place."""
        moved_mb = sum(x.batch_bytes for x in profile.training_loaders) / 1e6
        pick_ms = START_US / 1e3
        if profile.device_kind == "cpu":
            pick_ms += PICK_MS_PER_MB * moved_mb
        pick_ms *= max(1.0, profile.batches_per_step)
        now_ms = profile.phases_ms["data_wait"] + profile.phases_ms["h2d"]
        return Effect(
            step_ms=-max(0.0, now_ms - pick_ms),
            peak_bytes=int(set_bytes(profile)),
            startup_s=making_s(profile, machine),
            why=f"{set_bytes(profile) / 1e6:.0f} MB of samples kept on the device",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Place the set, and ask for a loader without workers: its batches are picked."""
        check_loader(arguments)
        check_seed(arguments.get("persistent_workers"))
        aliases.check()
        self.residents.find(arguments["dataset"], lambda: self._place(arguments["dataset"]))
        return {
            **arguments,
            "num_workers": _Workers(arguments),
            "pin_memory": False,
            "persistent_workers": False,
            "prefetch_factor": None,
            "timeout": 0,
        }

    def epoch(self, loader: Any) -> Any:
        """Give the loader back what the script asked for where its set is picked from no more."""
        check_loader(arguments_of(loader))
        check_seed(loader.persistent_workers)
        resident = self.residents.known(loader.dataset)
        trouble = resident.watch.trouble if resident.watch.is_changed() else aliases.reason()
        if trouble:
            resident.whole = None
            _give_back(loader)
            raise NotApplicable(trouble)
        return loader

    def batches(self, batches: Iterator[Any], loader: Any) -> Iterator[Any]:
        """Let the iterator fetch from the device of the training, as far as it is known by now."""
        check_loader(arguments_of(loader))
        check_seed(loader.persistent_workers)
        resident = self.residents.known(loader.dataset)
        if resident.watch.is_changed():
            raise NotApplicable(resident.watch.trouble)
        aliases.check()
        fetcher = getattr(batches, "_dataset_fetcher", None)
        if fetcher is None:
            raise NotApplicable("the loader has a way of its own to fetch")
        device = batch_device()
        if device.type == "cuda":
            aliases.watch()
        if not resident.is_on(device):
            resident.move(device, budget_bytes=self._budget_bytes(device))
        fetcher.fetch = picking(resident, fetcher.fetch, looks=not _asked_workers(loader))
        sampler = getattr(batches, "_sampler_iter", None)
        if sampler is not None and _asked_workers(loader):
            batches._sampler_iter = drawn_early(sampler, _asked_ahead(loader))  # type: ignore[attr-defined]
        return batches

    def end(self) -> str:
        """Say what the script changed or did, if that ended the picking."""
        known = (*(watch.trouble for watch in self.watches), aliases.reason())
        troubles = (trouble for trouble in known if trouble)
        return next((f"{x}: the loader made its own batches from then on" for x in troubles), "")

    def _place(self, dataset: Any) -> Resident:
        """Return the set in host memory: where it is needed is known when it is first used.

        A loader is often made before its model, and a model before it is moved.
        """
        budget_bytes = self._budget_bytes(batch_device())
        resident = made(dataset, budget_bytes=budget_bytes, make_s=self.make_s)
        self.watches.add(resident.watch)
        return resident

    def _budget_bytes(self, device: Any) -> int:
        return int(self.memory_share * _free(device))


class _Workers(int):
    """No workers, and what the script asked for instead."""

    asked: Mapping[str, Any]

    def __new__(cls, asked: Mapping[str, Any]) -> "_Workers":
        """Return a 0 that knows the arguments of the script."""
        made = super().__new__(cls, 0)
        made.asked = asked
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (0,)


def _asked_workers(loader: Any) -> int:
    workers = loader.num_workers
    return int((workers.asked.get("num_workers") or 0) if isinstance(workers, _Workers) else 0)


def _asked_ahead(loader: Any) -> int:
    """Return how many batches the workers that the script asked for make ahead."""
    return _asked_workers(loader) * (
        loader.num_workers.asked.get("prefetch_factor") or USUAL_PREFETCH
    )


def _give_back(loader: Any) -> None:
    """Let the loader start the workers that the script asked for, from its next epoch on."""
    if not isinstance(loader.num_workers, _Workers):
        return
    asked = loader.num_workers.asked
    loader.num_workers = asked.get("num_workers") or 0
    loader.pin_memory = asked.get("pin_memory", False)
    loader.timeout = asked.get("timeout", 0)
    if loader.num_workers:
        loader.prefetch_factor = asked.get("prefetch_factor") or USUAL_PREFETCH
        loader.multiprocessing_context = asked.get("multiprocessing_context")


def picking(resident: Resident, own: Any, *, looks: bool) -> Any:
    """Return a way to fetch that picks rows as long as the data set is what it was.

    `looks` says whether a change shows in the next batch, as it does without workers, and not only
    in the next epoch.
    """
    picked = copy(resident)  # its own way to the tensors: they may be given up before it ends

    def fetch(numbers: Sequence[int]) -> Any:
        if looks and picked.watch.is_changed():
            return own(numbers)
        batch = picked.fetch(numbers)
        if aliases.reason():
            return map_leaves(batch, lambda leaf: leaf.cpu())  # waited for: right on any stream
        return aliases.given(batch)

    return fetch


def batches_on_device(loader: Any, device: Any, *, make_s: float = 300.0) -> Iterator[Any]:
    """Return the batches of one epoch of a loader, picked from its set on the device.

    Where the set was changed since it was collated, its batches are made and then sent.

    Raises:
        NotApplicable: if the set changes on its own, does not stack or does not fit.
    """
    check_loader(arguments_of(loader))
    budget_bytes = int(0.9 * _free(device))
    dataset = loader.dataset
    resident = vars(loader).get(KEPT)
    if resident is None:
        resident = made(dataset, budget_bytes=budget_bytes, make_s=make_s)
        vars(loader)[KEPT] = resident
    if resident.whole is None or resident.watch.is_changed():
        return (_sent_batch(dataset, numbers, device) for numbers in iter(loader.batch_sampler))
    if not resident.is_on(device):
        resident.move(device, budget_bytes=budget_bytes)
    return (resident.fetch(numbers) for numbers in iter(loader.batch_sampler))


def _sent_batch(dataset: Any, numbers: Sequence[int], device: Any) -> Any:
    from torch.utils.data import default_collate

    batch = default_collate([dataset[number] for number in numbers])
    return map_leaves(batch, lambda leaf: leaf.to(device))


def made(dataset: Any, *, budget_bytes: int, make_s: float) -> Resident:
    """Return the set, collated once."""
    from torch.utils.data import TensorDataset

    if type(dataset) is not TensorDataset:
        found = examine(dataset)
        if not found.is_same:
            raise NotApplicable(found.trouble)
        budget_bytes = min(budget_bytes, int(0.5 * free_memory_bytes() / local_ranks()))
    return collate_whole(dataset, budget_bytes=budget_bytes, limit_s=make_s)


def check_loader(arguments: Mapping[str, Any]) -> None:
    """Make sure that picking rows gives what the loader would have made."""
    from torch.utils import data

    dataset = arguments["dataset"]
    if isinstance(dataset, data.IterableDataset | list) or not len(dataset):
        raise NotApplicable("only a map-style data set with samples can be kept on the device")
    if arguments.get("collate_fn") not in (None, data.default_collate):
        raise NotApplicable("the loader collates in a way of its own")
    if arguments.get("batch_size", 1) is None and arguments.get("batch_sampler") is None:
        raise NotApplicable("the loader does not make batches")
    check_sampler(arguments)


def check_seed(persistent_workers: Any) -> None:
    """Make sure that the loader draws a seed at the start of each epoch, as one without workers."""
    if persistent_workers is True:  # the script's own; what a technique sets is no plain True
        raise NotApplicable(
            "the script's persistent workers draw one seed for all epochs from the random stream, "
            "a loader without workers one for each"
        )


def arguments_of(loader: Any) -> Mapping[str, Any]:
    """Return of a loader what `check_loader` looks at."""
    names = ("dataset", "batch_size", "batch_sampler", "sampler", "collate_fn")
    return {name: getattr(loader, name) for name in names}


def set_bytes(profile: Profile) -> float:
    """Return the bytes of all samples of the training loaders, judged by their batches."""
    return sum(
        (x.dataset_len or 0) * x.batch_bytes / max(1, x.batch_size or 1)
        for x in profile.training_loaders
    )


def making_s(profile: Profile, machine: Machine) -> float:
    """Return the time to make all samples once, in one process; tensors only have to be copied."""
    loaders = profile.training_loaders
    if all(loader.dataset == IN_MEMORY for loader in loaders):
        return set_bytes(profile) / COPIED_BYTES_PER_S
    step_ms = loading(profile, machine.usable_cores).total_ms
    per_step = profile.samples_per_step_per_rank or sum(
        loader.batch_size or 1 for loader in loaders
    )
    return sum(loader.dataset_len or 0 for loader in loaders) * step_ms / per_step / 1e3


def _free(device: Any) -> int:
    import torch

    if torch.device(device).type != "cuda":
        return free_memory_bytes() // local_ranks()
    return int(torch.cuda.mem_get_info(device)[0])


KOREAN = """
Keep the whole set on the device and pick batches there.
    데이터셋 전체를 디바이스에 두고 배치를 거기서 고릅니다.
In place of the training loader, for a set that fits:
    디바이스에 들어가는 데이터셋이라면 학습 로더 대신:
{mb} MB of samples kept on the device
    샘플 {mb} MB를 디바이스에 둡니다
the loader has a way of its own to fetch
    로더가 자체 방식으로 샘플을 가져옵니다
{why}: the loader made its own batches from then on
    {why}. 그때부터는 로더가 배치를 직접 만들었습니다
only a map-style data set with samples can be kept on the device
    샘플이 있는 맵 스타일 데이터셋만 디바이스에 둘 수 있습니다
the loader collates in a way of its own
    로더가 자체 방식으로 배치를 묶습니다(collate)
the script's persistent workers draw one seed for all epochs from the random stream, a loader
without workers one for each
    스크립트의 persistent 워커는 난수열에서 모든 에폭에 시드 하나만 뽑지만, 워커 없는 로더는
    에폭마다 하나씩 뽑습니다
"""
