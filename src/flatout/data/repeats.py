"""Find out whether a data set gives the same sample each time, by asking it twice.

The samples are made in a forked copy of the process, each twice and with the random streams of
Python, numpy and torch in different places. A data set that draws from these streams is seen even
where the draw did not show in the sample.
"""

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.data.encoding import encode
from flatout.data.forked import ForkedError, in_fork
from flatout.data.streams import Streams

PROBED = 16
"""Samples that are made twice: a flip of a coin from a stream of its own hides once in 65,536."""
LIMIT_S = 30.0
"""Longest time for the samples; a data set that is slower still is not examined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """What making samples twice showed."""

    trouble: str = ""
    """Why samples may differ from call to call; empty where they do not."""
    sample_bytes: int = 0
    """Mean size of an encoded sample."""
    sample_s: float = 0.0
    """Mean time to make one, alone on a core."""

    @property
    def is_same(self) -> bool:
        """Whether every sample came twice bit by bit."""
        return not self.trouble


def examine(dataset: Any, *, limit_s: float = LIMIT_S) -> Repeats:
    """Return whether a map-style data set gives the same samples each time."""
    if hasattr(dataset, "set_epoch"):
        return Repeats(trouble="the data set has set_epoch: its samples change with the epoch")
    count = len(dataset)
    if count == 0:
        return Repeats(trouble="the data set is empty")
    indices = sorted({round(i * (count - 1) / max(1, PROBED - 1)) for i in range(PROBED)})
    try:
        found = in_fork(lambda: _examine(dataset, indices), limit_s)
    except ForkedError as error:
        return Repeats(trouble=f"its samples could not be examined: {error}")
    return Repeats(**found)


def _examine(dataset: Any, indices: Sequence[int]) -> dict[str, Any]:
    sizes: list[int] = []
    spent_s = 0.0
    for index in indices:
        reseed(1)
        before = Streams().digest()
        began = time.perf_counter()
        sample = dataset[index]
        spent_s += time.perf_counter() - began
        first = b"".join(encode(sample))
        if Streams().digest() != before:
            return {"trouble": f"sample {index} draws random numbers"}
        reseed(2)
        if b"".join(encode(dataset[index])) != first:
            return {"trouble": f"sample {index} is another one each time"}
        sizes.append(len(first))
    return {"sample_bytes": sum(sizes) // len(sizes), "sample_s": spent_s / len(indices)}


def reseed(seed: int) -> None:
    """Put the random streams of Python, numpy and torch somewhere."""
    import torch

    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
