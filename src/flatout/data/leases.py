"""Memory for batches that is used again once nobody refers to it.

A batch of 64 normalised photographs has 38.5 MB: fresh memory of that size is given back to the
system with each batch and zeroed with the next, which costs as much as filling it.
"""

import math
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

MAX_KEPT = 8
"""Blocks that wait to be used again: more than a loader has under way in a few threads."""
ALIGNMENT = 64


class Leases:
    """Blocks of memory, lent as tensors; a block comes back with the last view of its tensor."""

    def __init__(self) -> None:
        self._free: list[Any] = []
        self._renew_lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # a block may come back while this thread looks for one

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose content is not set."""
        count = math.prod(shape) * dtype.itemsize
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self._find(count)
        # This view lives as long as the tensor's storage, so as long as any view of the tensor.
        lent = block[:count]
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    @property
    def free(self) -> int:
        """Blocks that wait."""
        return len(self._free)

    def _find(self, count: int) -> Any:
        with self._lock:
            for number, block in enumerate(self._free):
                if count <= block.nbytes < 2 * count + ALIGNMENT:
                    return self._free.pop(number)
        # Numpy's memory, because it asks for huge pages.
        return np.empty(-(-count // ALIGNMENT) * ALIGNMENT, np.uint8)

    def _give_back(self, block: Any) -> None:
        with self._lock:
            self._free.append(block)
            del self._free[:-MAX_KEPT]
