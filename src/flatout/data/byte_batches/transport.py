"""Let a loader's batches travel as bytes: made in the worker, restored where they are used."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import dataloader as iterating
from torch.utils.data._utils import collate as collating
from torch.utils.data._utils import fetch as fetching

from flatout.agent import patching
from flatout.agent.nested import leaves_of, map_leaves
from flatout.agent.patching import Order
from flatout.data.byte_batches import ring
from flatout.data.byte_batches.arrays import ByteArray, LazyArray
from flatout.data.byte_batches.levels import Pixels, UnfollowableError
from flatout.data.byte_batches.lookup_tracing import Following
from flatout.data.byte_batches.packed import Packed, restored, shared_bytes
from flatout.data.byte_batches.tensors import LazyTensor, computed, from_array
from flatout.data.proof import aliases
from flatout.data.proof.random_streams import HeldStreams, Streams

HELD = "_flatout_held_streams"
"""On a fetcher: the generators that its samples draw from."""


class PackingCollate:
    """The script's own collation, whose followed fields leave as bytes."""

    def __init__(self, collate: Callable[[Any], Any], device: torch.device | None = None) -> None:
        self.collate = self.__wrapped__ = collate
        self.device = device
        """Where batches are restored; None for the CPU."""
        self.is_on = True
        self.trouble = ""
        """Why batches are made the ordinary way, once they are."""
        self.packed = 0
        """Fields that left as bytes."""
        self.following = Following()
        install()

    def __call__(self, samples: Any) -> Any:
        """Collate, and pack what can be."""
        batch = map_leaves(self.collate(samples), pack)
        self.packed += sum(type(leaf) is Packed for leaf in leaves_of(batch))
        return batch

    def restore_batch(self, batch: Any) -> Any:
        """Return a batch as the loop receives it; asked by probes that fetch for themselves.

        A script with streams of its own gets it on the CPU.
        """
        if self.device is None or aliases.reason():
            return unpack(batch)
        return aliases.given(unpack(batch, self.device))

    def __reduce__(self) -> Any:
        # A spawned worker installs what it needs.
        return PackingCollate, (self.collate, self.device)


def pack(leaf: Any) -> Any:
    """Return what a worker sends for one leaf of a batch."""
    if isinstance(leaf, LazyArray):
        leaf = leaf.read()
    if isinstance(leaf, ByteArray):
        return leaf.view(np.ndarray)
    if type(leaf) is not LazyTensor:
        _refuse_hidden(leaf)
        return leaf
    return _packed(leaf.pixels) if leaf.made is None else leaf.made


def _packed(pixels: Pixels) -> Any:
    if not pixels.grid.levels.is_floating_point():
        return computed(pixels)
    grid, store = pixels.grid, pixels.store
    if store is None:
        values = pixels.view
        store = shared_bytes(values.shape)
        if not pixels.is_ordered and torch.utils.data.get_worker_info() is None:
            with torch._C.DisableTorchFunction():
                store = torch.from_numpy(np.copy(values, "K"))
        else:
            store.numpy()[...] = values
    return Packed(store, grid.levels, pixels.axis, grid.steps)


def _refuse_hidden(leaf: Any) -> None:
    """Refuse an object of the script's own that holds what is followed: no one would restore it."""
    if isinstance(leaf, torch.Tensor) or not hasattr(leaf, "__dict__"):
        return
    held = leaves_of(list(vars(leaf).values()))
    if any(isinstance(part, LazyTensor | LazyArray) for part in held):
        raise UnfollowableError(f"a {type(leaf).__name__} of the script's own holds a picture")


def unpack(batch: Any, device: torch.device | None = None) -> Any:
    """Return a batch as the script's own collation would have made it."""

    def restore(leaf: Any) -> Any:
        return restored(leaf, device) if type(leaf) is Packed else leaf

    return map_leaves(batch, restore)


@functools.cache
def install() -> None:
    """Make torch's fetchers follow, and its iterators restore, where `PackingCollate` collates."""
    collating.default_collate_fn_map[LazyTensor] = _collate_tensors
    collating.default_collate_fn_map[LazyArray] = _collate_arrays
    wrap = functools.partial(patching.wrap, order=Order.TECHNIQUE)
    wrap(fetching._MapDatasetFetcher, "fetch", _following_fetches)
    for name in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
        wrap(getattr(iterating, name), "_next_data", _restoring_batches)
    wrap(iterating._MultiProcessingDataLoaderIter, "_shutdown_workers", _forgetting_blocks)


def _following_fetches(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fetch(fetcher: Any, indices: Any) -> Any:
        plan = find_plan(fetcher.collate_fn)
        if plan is None or not plan.is_on:
            return original(fetcher, indices)
        held = fetcher.__dict__.get(HELD)
        if held is None:
            held = fetcher.__dict__[HELD] = HeldStreams(fetcher.dataset, plan.collate)
        return follow_or_repeat(plan, lambda: original(fetcher, indices), held)

    return fetch


def _restoring_batches(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def next_data(iterator: Any) -> Any:
        batch = original(iterator)
        plan = find_plan(iterator._collate_fn)
        return batch if plan is None else plan.restore_batch(batch)

    return next_data


def _forgetting_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let what is known of workers' blocks go with the workers."""
    forget, is_ending = ring.forget_ended, sys.is_finalizing

    @functools.wraps(original)
    def shutdown_workers(iterator: Any) -> None:
        original(iterator)
        if not is_ending():  # Python takes modules apart by then
            forget()

    return shutdown_workers


def find_plan(collate: Any) -> PackingCollate | None:
    """Return the packing collation under what others wrapped around it, as `__wrapped__`."""
    while collate is not None and not isinstance(collate, PackingCollate):
        collate = getattr(collate, "__wrapped__", None)
    return collate


def follow_or_repeat(
    plan: PackingCollate, fetch: Callable[[], Any], held: HeldStreams | None = None
) -> Any:
    """Make a batch followed; where that fails, make it again the ordinary way, with the same draws.

    An error of the data set's own comes from the ordinary way, in its own words, and following goes
    on for the next batch. If the ordinary way works, following was at fault and ends.
    """
    streams = Streams()
    if held is not None:
        held.note()
    try:
        with plan.following.opened():
            return fetch()
    except (Exception, UnfollowableError) as error:  # noqa: BLE001  the user's code runs here
        reason = f"{type(error).__name__}: {error}"
    streams.set_back()
    if held is not None:
        held.set_back()
    batch = fetch()
    plan.is_on, plan.trouble = False, reason
    return batch


def _collate_tensors(samples: Any, *, collate_fn_map: Any = None) -> Any:
    return torch.stack(list(samples), 0)


def _collate_arrays(samples: Any, *, collate_fn_map: Any = None) -> Any:
    if not all(isinstance(sample, LazyArray) for sample in samples):
        raise UnfollowableError("some samples of a field are images and some are not")
    if any(sample.made is not None for sample in samples):
        # As torch collates arrays, in a worker in memory that is shared already.
        collate: Any = collating.default_collate
        return collate([torch.from_numpy(sample.read()) for sample in samples])
    return torch.stack([LazyTensor(from_array(sample.pixels).pixels) for sample in samples], 0)
