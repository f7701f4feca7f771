"""A batch in parts along its samples."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree


def batch_size(arguments: Any) -> int:
    """Return the first size of the first tensor, 0 where there is none."""
    leaves = _pytree.tree_leaves(arguments)
    sized = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next((int(leaf.shape[0]) for leaf in sized), 0)


def samples_at(arguments: Any, size: int, rows: Sequence[int]) -> Any:
    """Return the arguments of a batch of that size for some of its samples only."""
    leaves, structure = _pytree.tree_flatten(arguments)

    def picked(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size:
            return leaf[torch.tensor(rows, device=leaf.device)]
        return leaf

    return _pytree.tree_unflatten([picked(leaf) for leaf in leaves], structure)


def split(arguments: Any, size: int, chunks: int) -> list[Any]:
    """Return the arguments of each part, in order."""
    leaves, structure = _pytree.tree_flatten(arguments)
    count = min(chunks, size)

    def parts_of(leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size:
            return torch.tensor_split(leaf, count)
        return [leaf] * count

    columns = zip(*(parts_of(leaf) for leaf in leaves), strict=True)
    return [_pytree.tree_unflatten(list(column), structure) for column in columns]
