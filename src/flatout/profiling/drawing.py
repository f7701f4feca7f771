"""Make a loader's batches in this process, as a worker would."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data.dataloader as loading

from flatout.core.nested import map_leaves
from flatout.seams.loader import as_received
from flatout.seams.samples import size_chosen

dataloader: Any = loading
"""Its fetchers are nobody's public interface, and torch gives them no types."""


def made_here(loader: Any) -> Iterator[Any]:
    """Yield the loader's batches, made in this process whatever workers it has; more than once.

    Each as the loop receives it, as a worker sends it, and how many samples were chosen for it.
    """
    while True:
        fetcher = dataloader._DatasetKind.create_fetcher(
            loader._dataset_kind,
            loader.dataset,
            loader._auto_collation,
            loader.collate_fn,
            loader.drop_last,
        )
        drawn = False
        for numbers in iter(loader._index_sampler):
            try:
                batch = fetcher.fetch(numbers)
            except StopIteration:
                break
            drawn = True
            received = as_received(loader.collate_fn, batch)
            yield received, map_leaves(batch, _as_sent), size_chosen(numbers)
        if not drawn:
            return


def _as_sent(leaf: Any) -> Any:
    """Return the bytes of a leaf that travels packed; any other as it is."""
    packed = getattr(leaf, "bytes", None)
    return packed if isinstance(packed, torch.Tensor) else leaf


def start_as_worker(start: Any) -> None:
    """Do here what a recipe's levers do when a worker starts, and nothing of the script's own."""
    while start is not None:
        if hasattr(start, "start_here"):
            start.start_here()
        start = getattr(start, "then", None) or getattr(start, "asked", None)
