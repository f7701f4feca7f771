"""Give the first batches again and again, so that data cost nothing; or their copies neither.

What is left is a step whose loader is infinitely fast: the ceiling of everything that can be done
about data. The batches are made in the training process, no worker is started. The sampler still
runs, so that epochs keep their length and the script's loops go on.
"""

import copy
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flatout.agent import patching
from flatout.agent.hooks.loader import ADDRESS, as_received
from flatout.agent.measuring.batch_making import Company, dataloader, fetcher_of
from flatout.agent.nested import map_leaves
from flatout.agent.session import Session

RING = 4
"""Batches that are replayed in turn: mixed shapes stay mixed, and memory stays small."""
DEVICE = "device"
SHORTEST_EPOCH = 200
"""Batches at least in an epoch whose length no one knows: a stream that ended with the timed run
may have been much longer."""


def start(session: Session, options: Mapping[str, Any]) -> "BatchReplay":
    """Replay the loaders at the addresses in `options["loaders"]`.

    `options["what"]` is `host`, or `device` for batches that are on the training device already.
    `options["lengths"]` has batches per epoch by address, for streams that have no length.
    `options["company"]` is the number of processes that make batches alongside the training.
    """
    replay = BatchReplay(session, options)
    replay.install()
    return replay


class BatchReplay:
    """Replace the iterators of the training loaders by ones that replay."""

    def __init__(self, session: Session, options: Mapping[str, Any]) -> None:
        self.session = session
        self.moves = options["what"] == DEVICE
        self.addresses = frozenset(options["loaders"])
        self.lengths: Mapping[str, int] = options.get("lengths", {})
        self.device: torch.device | None = None
        self.rings: dict[tuple[str, int], _Ring] = {}
        self.company = Company(options.get("company", 0))
        self.trained_s: list[float] = []
        """CPU seconds of this process from one batch to the next, alongside the company."""
        self._given_s: float | None = None

    def install(self) -> None:
        """Stand in where torch makes an iterator: what the hook points put around it stays."""
        patching.wrap(dataloader.DataLoader, "_get_iterator", self.replaying)
        self.session.on("root", self.saw_root)

    def replaying(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the making of an iterator, of which some replay."""

        @functools.wraps(make)
        def make_replaying(loader: Any) -> Any:
            address = loader.__dict__.get(ADDRESS, "")
            if address not in self.addresses or not self.session.is_mine():
                return make(loader)
            return self.begin(loader, address)

        return make_replaying

    def saw_root(self, root: torch.nn.Module) -> None:
        """Learn which device trains."""
        self.device = next(root.parameters()).device

    def begin(self, loader: Any, address: str) -> Any:
        """Return an iterator that draws from the loader's ring."""
        # No worker will be behind these batches, so no burst either.
        self.session.loaders[address].asked["effective_workers"] = 0
        key = address, id(loader.dataset)
        ring = self.rings.setdefault(key, _Ring(loader.dataset))
        return _replaying_class()(loader, self, ring, self._length(loader, address))

    def result(self) -> Mapping[str, Any]:
        """Return how many batches were replayed, and where they lay."""
        self.company.end()
        rings = self.rings.values()
        samples, made_s = self.company.made
        return {
            "trained_s": self.trained_s,
            "made_samples": samples,
            "made_s": made_s,
            "replayed": sum(ring.replayed for ring in rings),
            "kept": sum(len(ring.kept) for ring in rings),
            "restored": sum(kept.restored for ring in rings for kept in ring.kept),
            "device": str(self.device) if self.moves and self.device else "",
        }

    def draw(self, loader: Any, ring: "_Ring") -> Any:
        """Return the next kept batch, and note what the training took since the one before."""
        if self._given_s is not None:
            self.trained_s.append(time.process_time() - self._given_s)
        self.company.start(loader)
        batch = ring.next_batch(self.device if self.moves else None)
        self._given_s = time.process_time() if self.company.number else None
        return batch

    def _length(self, loader: Any, address: str) -> int | None:
        """Return after how many batches a stream ends; None where the sampler knows."""
        if loader._dataset_kind != dataloader._DatasetKind.Iterable:
            return None
        try:
            return len(loader)
        except (TypeError, NotImplementedError):
            return max(SHORTEST_EPOCH, self.lengths.get(address, 0))


class _Ring:
    """The kept batches of one loader."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset  # held, so that its id stays its own
        self.kept: list[_Kept] = []
        self.replayed = 0

    def next_batch(self, device: torch.device | None) -> Any:
        """Return the next kept batch; on a device where one is given."""
        kept = self.kept[self.replayed % len(self.kept)]
        self.replayed += 1
        if device is not None:
            kept.move(device)
        return kept.give()


class _Kept:
    """One batch, and a copy of it for scripts that change their batches in place."""

    def __init__(self, batch: Any) -> None:
        self.is_moved = False
        self.restored = 0
        self._hold(batch)

    def move(self, device: torch.device) -> None:
        """Put the batch on the device, once."""
        if not self.is_moved:
            self.is_moved = True
            self._hold(change_tensors(self.batch, lambda tensor: tensor.to(device)))

    def give(self) -> Any:
        """Return the batch as it was, in containers of its own: a script may pop its labels."""
        if [_version(tensor) for tensor in self.tensors] != self.versions:
            self._restore()
        # Detached: the gradient of an input must not pile up over the steps.
        return change_tensors(self.batch, lambda tensor: tensor.detach())

    def _hold(self, batch: Any) -> None:
        # Never the script's own containers.
        self.batch = change_tensors(batch, lambda tensor: tensor.detach())
        self.tensors = tensors_in(self.batch)
        self.pristine = [tensor.clone() for tensor in self.tensors]
        self.versions = [_version(tensor) for tensor in self.tensors]

    def _restore(self) -> None:
        self.restored += 1
        with torch.no_grad():
            for tensor, before in zip(self.tensors, self.pristine, strict=True):
                tensor.copy_(before)
        self.versions = [_version(tensor) for tensor in self.tensors]


@functools.cache
def _replaying_class() -> Any:
    """Return the iterator's class; its base is whatever this torch has."""
    base: Any = dataloader._BaseDataLoaderIter

    class Replaying(base):  # type: ignore[misc]
        """Draws from a ring once that is full; until then from the data set itself."""

        def __init__(
            self, loader: Any, replay: BatchReplay, ring: _Ring, length: int | None
        ) -> None:
            super().__init__(loader)
            self.loader = loader
            self.replay, self.ring, self.length = replay, ring, length
            self.fetcher: Any = None

        def _next_data(self) -> Any:
            if self.length is not None and self._num_yielded >= self.length:
                raise StopIteration
            index = self._next_index()
            if len(self.ring.kept) < RING:
                return self.keep(index)
            return self.replay.draw(self.loader, self.ring)

        def keep(self, index: Any) -> Any:
            """Fetch a batch as a loader without workers does, and keep it."""
            if self.fetcher is None:
                self.fetcher = fetcher_of(self.loader)
            batch = as_received(self._collate_fn, self.fetcher.fetch(index))
            if self._pin_memory:
                pin = dataloader._utils.pin_memory.pin_memory
                batch = pin(batch, self._pin_memory_device)
            self.ring.kept.append(_Kept(batch))
            return batch

    return Replaying


def change_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with every tensor changed, in new containers of the same types.

    Objects of the script's own are copied with their fields changed, one level deep.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        fields = getattr(leaf, "__dict__", None)
        if not fields or isinstance(leaf, type) or callable(leaf):
            return leaf
        rebuilt = copy.copy(leaf)
        for name, value in fields.items():
            rebuilt.__dict__[name] = map_leaves(value, tensor_only)
        return rebuilt

    def tensor_only(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(batch, changed)


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch, in a stable order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    change_tensors(batch, note)
    return found


def _version(tensor: torch.Tensor) -> int:
    """Return how often the tensor was changed in place, as torch counts it."""
    return 0 if tensor.is_inference() else tensor._version
