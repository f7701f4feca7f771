"""Prove on a script's own samples that another way to make batches gives the same ones.

`compare_first_batches` does it with a `BatchComparison`: `BITS`, or `ALIKE` where pixels may differ
(equal labels, and pictures alike in the large).
"""

import hashlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils import fetch as fetching

from flatout.agent.nested import leaves_of
from flatout.data.byte_batches.transport import unpack
from flatout.data.proof.forked import in_forks
from flatout.data.proof.random_streams import Streams

SAMPLES = 12
"""Samples that are compared, of the loader's first batch. A photograph takes some milliseconds, and
the training waits for them."""
LIMIT_S = 60.0
"""Longest time for them."""
WAYS = ("the script's own way", "the other way")


def first_batch(loader: Any, collate: Callable[[Any], Any]) -> Any:
    """Make the loader's first batch, cut down, with a collation of one's choice.

    Without batches it is a sample. What travels as bytes is restored.
    """
    kind: Any = fetching._MapDatasetFetcher
    is_batched = loader.batch_sampler is not None
    drawn = next(iter(loader.batch_sampler if is_batched else loader.sampler))
    indices = list(drawn)[:SAMPLES] if is_batched else drawn
    return unpack(kind(loader.dataset, is_batched, collate, drop_last=False).fetch(indices))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchComparison:
    """What is looked at in both batches, and what may differ."""

    describe: Callable[[Any], list[Any]]
    """A batch to plain JSON values."""
    difference: Callable[[list[Any], list[Any]], str]
    """Of two descriptions, the script's first; empty where they are the same or close enough."""


def compare_first_batches(
    loader: Any,
    other: Callable[[], tuple[Any, Any]],
    look: BatchComparison | None = None,
    undo: Callable[[], None] = lambda: None,
) -> tuple[str, Any]:
    """Compare a loader's first batch with the one that another way makes of the same samples.

    Two copies of the process are forked at the same moment, so that every random stream is alike in
    both, those that a data set keeps for itself included. Each makes the loader's first batch, one
    in the script's way and one in the other; the digests are compared here.

    `other` makes one in the other way and returns it with facts, plain JSON values. `undo` goes the
    script's way again in a copy of this process, in which the other way may be at work for another
    loader already. Returned is how the batches differ, empty where they do not, and the facts.
    """
    look, collate = look or BITS, loader.collate_fn
    streams = Streams()

    def make_plain() -> Any:
        streams.set_back()
        undo()
        return look.describe(first_batch(loader, collate))

    def make_other() -> Any:
        streams.set_back()
        batch, facts = other()
        return [look.describe(batch), facts]

    _load_formats()
    results = in_forks([make_plain, make_other], LIMIT_S)
    for result, name in zip(results, WAYS, strict=True):
        trouble = _trouble_of(result, name)
        if trouble:
            return trouble, None
    expected, (found, facts) = (result["value"] for result in results if result is not None)
    return look.difference(expected, found), facts


def _load_formats() -> None:
    """Let Pillow import its usual formats here: each copy, and each worker, would do it again."""
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None:
        pillow.preinit()


def _trouble_of(result: dict[str, Any] | None, name: str) -> str:
    """Return why a way gave nothing; empty where it gave a batch."""
    if result is None:
        return f"{name} took more than {LIMIT_S:.0f} s for the first samples"
    if "error" in result:
        return f"a sample could not be made in {name}: {result['error']}"
    return ""


def _difference(expected: list[Any], found: list[Any]) -> str:
    if len(expected) != len(found):
        return f"the batches differ: {len(found)} fields instead of {len(expected)}"
    for one, two in zip(expected, found, strict=True):
        if one[:-1] != two[:-1]:
            return f"the batches differ: {two[:-1]} instead of {one[:-1]}"
        if one != two:
            return f"the batches differ in the values of {one[:-1]}"
    return ""


def can_be_compared(loader: Any) -> str:
    """Return why a loader's batches cannot be compared, or an empty text."""
    if isinstance(loader.dataset, IterableDataset):
        return "the data set is iterable: there is no sample to make twice"
    return ""


def digests(batch: Any) -> list[list[Any]]:
    """Return type, shape, strides and digest of every leaf of a batch, as plain JSON values."""
    return [_digest(leaf) for leaf in leaves_of(batch)]


def _digest(leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
        raw = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        form: list[Any] = [
            type(leaf).__name__,
            str(leaf.dtype),
            list(leaf.shape),
            list(leaf.stride()),
        ]
    elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        raw, form = leaf.tobytes(), [str(leaf.dtype), list(leaf.shape), list(leaf.strides)]
    else:
        raw, form = _pickled(leaf), [type(leaf).__qualname__]
    return [*form, hashlib.blake2b(raw, digest_size=16).hexdigest()]


def _pickled(leaf: Any) -> bytes:
    try:
        return pickle.dumps(leaf)
    except Exception:  # noqa: BLE001  pickling runs the user's code; only its type is compared then
        return b""


BITS = BatchComparison(describe=digests, difference=_difference)
"""The batches have to be the same."""


FIELDS = 64
"""Parts of a sample whose means are compared: of a picture, bands."""
PICTURE_DIMS = 3
FAR = 0.05
"""Largest mean distance of these means, over their deviation."""


def describe(batch: Any) -> list[list[Any]]:
    """Return for each leaf its form, and means for pictures, or the digest for all else."""
    return [_means(leaf) or digests(leaf)[0] for leaf in leaves_of(batch)]


def difference(expected: list[Any], found: list[Any]) -> str:
    """Return how far two descriptions are from being alike; empty where they are."""
    if len(expected) != len(found):
        return f"the batches differ: {len(found)} fields instead of {len(expected)}"
    for one, two in zip(expected, found, strict=True):
        if not isinstance(one[-1], list):
            if one != two:
                return f"the batches differ in {one[:-1]}, which holds no pictures"
            continue
        if one[:-1] != two[:-1]:
            return f"the batches differ: {two[:-1]} instead of {one[:-1]}"
        ours, theirs = np.asarray(one[-1]), np.asarray(two[-1])
        off = float(np.abs(ours - theirs).mean() / max(float(ours.std()), 1e-9))
        if not off <= FAR:
            return (
                f"the pictures are not alike: {off:.2g} of their deviation apart, {FAR} is allowed"
            )
    return ""


def _means(leaf: Any) -> list[Any]:
    """Return the form of a batch of pictures and the means of their bands; nothing for all else."""
    values = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
    if not isinstance(values, torch.Tensor) or values.dim() <= PICTURE_DIMS:
        return []
    bands = values.detach().cpu().double().reshape(len(values), 1, -1)
    means = torch.nn.functional.adaptive_avg_pool1d(bands, min(FIELDS, bands.shape[-1]))
    return [str(values.dtype), list(values.shape), means.flatten().tolist()]


ALIKE = BatchComparison(describe=describe, difference=difference)
"""Labels are the same, pictures alike."""
