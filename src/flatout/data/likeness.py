"""Are two batches alike, where pixels may differ: equal labels, and pictures alike in the large."""

from typing import Any

import numpy as np
import torch

from flatout.data.proof import Look, digests
from flatout.data.transport import leaves

FIELDS = 64
"""Parts of a sample whose means are compared: of a picture, bands."""
PICTURE_DIMS = 3
FAR = 0.05
"""Largest mean distance of these means, over their deviation."""


def describe(batch: Any) -> list[list[Any]]:
    """Return for each leaf its form, and means for pictures, or the digest for all else."""
    return [_means(leaf) or digests(leaf)[0] for leaf in leaves(batch)]


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


ALIKE = Look(describe=describe, difference=difference)
"""Labels are the same, pictures alike."""
