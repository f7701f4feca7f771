"""Copy the next batch to the device while the present one is computed.

What it does: takes one batch ahead and copies it on a stream of its own; the loop receives batches
that are on the device already, and its own `.to(device)` has nothing left to do. The loader's
sampler draws when the loop asks, as without it.
When it helps: copies from host to device take a visible part of the step on a CUDA device.
What it costs: device memory for one more batch; batches are pinned.
How it is checked: the batches are bit-identical, in the same order and structure.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent.nested import leaves_of, map_leaves
from flatout.agent.training_device import batch_device
from flatout.data.proof import aliases
from flatout.data.proof.sampler_draws import check_sampler
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique
from flatout.techniques.data.pinned_memory import MIN_COPY_SHARE, pinned

if TYPE_CHECKING:
    import torch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrefetch(Technique):
    """Copy the next batch while this one is computed."""

    addresses: ClassVar[frozenset[str]] = frozenset({"h2d"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    stages: ClassVar[tuple[str, ...]] = ("copy",)
    by_hand: ClassVar[str] = """
Around the training loader:
+ from flatout.techniques.data.device_prefetch import prefetch_to_device
+ for batch in prefetch_to_device(loader, device):
"""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["DevicePrefetch"]:
        """Return the technique when a CUDA device waits for copies and workers load the batches."""
        if profile.device_kind != "cuda" or profile.share("h2d") < MIN_COPY_SHARE:
            return ()
        loaders = profile.training_loaders
        return [cls()] if loaders and all(loader.workers for loader in loaders) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the copies to hide behind the computation, which costs one more batch."""
        copies_ms = profile.phases_ms["h2d"]
        compute_ms = profile.step_ms.median * profile.share("forward", "backward", "optimizer")
        return Effect(
            step_ms=-min(copies_ms, compute_ms),
            peak_bytes=sum(loader.batch_bytes for loader in profile.training_loaders),
            why=f"{copies_ms:.1f} ms of copies per step hidden behind the computation",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask for page-locked batches: only those copy while the device computes."""
        _check_workers(arguments.get("num_workers"))
        return pinned(arguments)

    def batches(self, batches: Iterator[Any], loader: Any) -> Iterator[Any]:
        """Return the batches on the device, each copied while the one before is computed."""
        import torch
        from torch.utils.data import IterableDataset

        _check_workers(loader.num_workers)
        if not torch.cuda.is_available():
            raise NotApplicable("there is no CUDA device to copy to")
        device = batch_device()
        if device.type != "cuda":
            raise NotApplicable(f"the training runs on {device}, which is no CUDA device")
        aliases.check()
        if not is_drawing(batches) and not isinstance(loader.dataset, IterableDataset):
            check_sampler(vars(loader))  # it is asked one batch early
        return prefetch_to_device(batches, device)

    def end(self) -> str:
        """Say that the copies were the script's own, if they had to be."""
        why = aliases.reason()
        return f"{why}: its own copies were left to it" if why else ""


def _check_workers(workers: Any) -> None:
    if not workers:
        raise NotApplicable(
            "without workers, drawing a batch ahead would move the trainer's random stream"
        )


def prefetch_to_device(batches: Iterable[Any], device: "torch.device | str") -> Iterator[Any]:
    """Return the batches on a CUDA device, each copied on a side stream one batch ahead.

    Tensors in nested lists, tuples, mappings and dataclasses are copied; everything else is
    passed on. Give it a loader with `pin_memory=True`: pageable memory cannot be copied aside.
    Once the caller enters a stream of its own, batches are passed on as they are.

    Raises:
        ValueError: if the device is not a CUDA device.
    """
    import torch

    target = torch.device(device)
    if target.type != "cuda":
        raise ValueError(f"prefetching needs a CUDA device, not {target}; give device='cuda'")
    aliases.watch()
    return _AheadIterator(iter(batches), _SideStreamCopy(target))


class _AheadIterator:
    """Hold one prepared batch ready; hand it out and prepare the next at once.

    Everything else that a loop may ask of a loader's iterator is passed on to it.
    """

    def __init__(self, batches: Iterator[Any], copy: "_SideStreamCopy") -> None:
        self._batches: Any = batches
        self._copy = copy
        self._next: Callable[[], Any] | None = None
        self._owed = 0
        """How often the loader's sampler is to be asked when the loop asks for its next batch."""

    def __iter__(self) -> "_AheadIterator":
        return self

    def __next__(self) -> Any:
        for _ in range(self._owed):
            self._batches._try_put_index()
        self._owed = 0
        if self._next is None:
            self._prepare()
        ready, self._next = self._next, None
        batch = ready()  # type: ignore[misc]
        if not is_drawing(self._batches):
            self._prepare()
        elif self._batches._rcvd_idx < self._batches._send_idx and (
            self._batches._prefetch_factor > 1  # else a worker would wait for its numbers
        ):
            self._prepare_undrawn(self._batches)
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def _prepare(self) -> None:
        try:
            self._next = self._copy.begin(next(self._batches))
        except Exception as error:  # noqa: BLE001  it is the loop's, where it would have come
            self._next = partial(_raise, error)

    def _prepare_undrawn(self, batches: Any) -> None:
        """Prepare a batch, but leave what torch would then have the sampler draw for later.

        A sampler may draw from a stream that the step draws from, too.
        """
        batches._try_put_index = self._owe
        try:
            self._prepare()
        finally:
            del batches._try_put_index

    def _owe(self) -> None:
        self._owed += 1


def is_drawing(batches: Any) -> bool:
    """Return whether it is torch's own iterator, with workers, over numbers of a sampler."""
    from torch.utils.data import _DatasetKind
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    is_own = isinstance(batches, _MultiProcessingDataLoaderIter)
    return is_own and batches._dataset_kind == _DatasetKind.Map


def _raise(error: Exception) -> Any:
    raise error


class _SideStreamCopy:
    """Copy batches on a stream of their own and hand them over to the stream that computes."""

    def __init__(self, device: "torch.device") -> None:
        import torch

        self.torch = torch
        self.device = device
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Start the copy, and return what hands the batch over once it is needed."""
        if aliases.reason():
            return lambda: batch
        with self.torch.cuda.stream(self.side):
            copied = map_leaves(batch, self._copied)

        def hand_over() -> Any:
            current = self.torch.cuda.current_stream(self.device)
            current.wait_stream(self.side)
            # The memory belongs to the side stream's pool: without the record it could be given to
            # the next copy while the computation still reads it.
            for leaf in leaves_of(copied):
                if isinstance(leaf, self.torch.Tensor) and leaf.is_cuda:
                    leaf.record_stream(current)
            if aliases.reason():
                self.side.synchronize()  # whichever stream reads it, nothing is copied there again
            return aliases.given(copied)

        return hand_over

    def _copied(self, leaf: Any) -> Any:
        is_dense = isinstance(leaf, self.torch.Tensor) and leaf.layout == self.torch.strided
        if not is_dense or leaf.device.type != "cpu":
            return leaf
        return leaf.to(self.device, non_blocking=True)


KOREAN = """
Copy the next batch while this one is computed.
    한 배치를 계산하는 동안 다음 배치를 복사합니다.
Around the training loader:
    학습 로더를 감쌉니다:
{ms} ms of copies per step hidden behind the computation
    스텝마다 {ms} ms인 복사를 계산과 겹칩니다
there is no CUDA device to copy to
    복사할 CUDA 디바이스가 없습니다
{why}: its own copies were left to it
    {why}. 복사는 스크립트에 맡겼습니다
without workers, drawing a batch ahead would move the trainer's random stream
    워커가 없으면 배치를 미리 뽑을 때 학습 쪽 난수열이 움직입니다
prefetching needs a CUDA device, not {device}; give device='cuda'
    미리 복사하려면 {device}이(가) 아니라 CUDA 디바이스가 필요합니다. device='cuda'를 주세요
"""
