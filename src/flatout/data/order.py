"""The order of an epoch as a function of seed and epoch, and nothing else.

`permutation` shuffles all samples. `block_permutation` keeps samples that lie side by side in a
pre-shuffled store together: blocks are shuffled, and so are the samples in a window of many blocks.
Both sort keys of a counter-based generator (Philox), whose stream NumPy promises to keep.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

Places = np.ndarray[tuple[int], np.dtype[np.int64]]
MIN_BLOCK, MAX_BLOCK = 8, 16
"""Samples in a block: 0.6 to 1.2 MB of photographs are read in one go."""
MIN_WINDOW = 4096
"""Samples that are mixed: 16 batches of 256 or more; below, batches of two epochs resemble each
other (0.060 of a batch stays together at 4,096, 0.044 by chance)."""
MAX_VARIANCE_RATIO = 1.5
"""Spread of the classes' counts in a batch over that of a uniform shuffle. 100 batches of 256 from
1,000 classes stay below 1.05; a buffer of 1,000 over sorted samples has 12."""
ORDERS, BLOCKS, WINDOWS, SAMPLES = range(4)
"""What a stream of keys is for: streams of one seed never repeat each other."""


def permutation(samples: int, *, seed: int, epoch: int) -> Places:
    """Return every number below `samples` once, shuffled.

    >>> permutation(5, seed=0, epoch=0).tolist() == permutation(5, seed=0, epoch=0).tolist()
    True
    >>> sorted(permutation(5, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4]
    """
    return _sorted_keys(samples, seed, epoch, ORDERS)


def block_permutation(
    samples: int, *, seed: int, epoch: int, block: int = MAX_BLOCK, window: int = MIN_WINDOW
) -> Places:
    """Return every number below `samples` once; blocks shuffled, then samples inside windows.

    Only right for a store that is shuffled itself.

    Raises:
        ValueError: if the blocks are too large, or the window too small, to mix well.
    """
    if not 1 <= block <= MAX_BLOCK:
        raise ValueError(f"block={block} must be between 1 and {MAX_BLOCK}")
    if window < MIN_WINDOW or window % block:
        raise ValueError(f"window={window} must be a multiple of {block}, {MIN_WINDOW} or more")
    blocks = _sorted_keys(-(-samples // block), seed, epoch, BLOCKS)
    spread = (blocks[:, None] * block + np.arange(block)).ravel()
    places: Places = spread[spread < samples]
    keys = _keys(samples, seed, epoch, WINDOWS)
    for start in range(0, samples, window):
        inside = slice(start, start + window)
        places[inside] = places[inside][np.argsort(keys[inside], kind="stable")]
    return places


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return the 63 bits that a sample's augmentation is drawn from in an epoch.

    >>> len({sample_seed(0, epoch, sample) for epoch in range(3) for sample in range(100)})
    300
    """
    counter = [0, sample, epoch, SAMPLES]
    drawn = np.random.Philox(key=seed % 2**64, counter=counter).random_raw()
    return int(drawn) >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let `random`, NumPy and torch draw from a seed inside; their streams stay where they are."""
    import random

    import torch

    from flatout.data.streams import Streams

    streams = Streams()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        streams.set_back()


def variance_ratio(labels: Sequence[int] | np.ndarray[Any, Any], batch_size: int) -> float:
    """Return how much more unevenly classes fall into batches than by a uniform shuffle.

    Args:
        labels: the label of each slot, in the order to be judged.
        batch_size: slots in a batch; a last shorter batch is left out.
    """
    found = np.unique(np.asarray(labels), return_inverse=True)[1].reshape(-1)
    whole = len(found) // batch_size * batch_size
    classes = int(found.max()) + 1 if len(found) else 0
    if classes < 2 or whole < 2 * batch_size:
        return 1.0
    rows = found[:whole].reshape(-1, batch_size)
    numbers = np.arange(len(rows))[:, None] * classes + rows
    counts = np.bincount(numbers.ravel(), minlength=len(rows) * classes).reshape(-1, classes)
    shares = np.bincount(found[:whole], minlength=classes) / whole
    # Drawing without replacement: the hypergeometric variance, in all classes together.
    expected = batch_size * shares * (1 - shares) * (whole - batch_size) / (whole - 1)
    measured = ((counts - batch_size * shares) ** 2).mean(axis=0)
    return float(measured.sum() / expected.sum())


def _sorted_keys(count: int, seed: int, epoch: int, purpose: int) -> Places:
    order: Places = np.argsort(_keys(count, seed, epoch, purpose), kind="stable")
    return order


def _keys(count: int, seed: int, epoch: int, purpose: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return that many 64-bit keys; epoch and purpose are the high words of the counter."""
    philox = np.random.Philox(key=seed % 2**64, counter=[0, 0, epoch, purpose])
    return np.asarray(philox.random_raw(count), dtype=np.uint64)
