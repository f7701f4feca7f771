"""A plan is for the worst batch: let a loader draw its largest sample again and again.

Only where that is cheap: samples are looked at for a few seconds at most, and where the first ones
are all of one size nothing is changed.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from flatout.seams.samples import tensor_bytes
from flatout.workflow.worst_batches import WorstBatches, size_of

LOOK_S = 3.0
"""How long samples are looked at."""
MOST_SAMPLES = 20_000
ALIKE = 64
"""So many samples of one size mean that all have it."""

Note = Callable[[str], None]


def worst_case(arguments: Mapping[str, Any], note: Note) -> Mapping[str, Any]:
    """Return what changes in a loader's arguments, so that every sample is the largest one.

    Args:
        arguments: Those of a `DataLoader`, by parameter name.
        note: Is told what was found, or why nothing was looked at.
    """
    dataset: Any = arguments.get("dataset")
    sampler = arguments.get("batch_sampler")
    size = None if sampler is None else size_of(sampler)
    if (sampler is not None and size is None) or not _is_indexed(dataset):
        note(
            "the data set was not looked at for its largest sample (a batch sampler of its own, or "
            "iterable data): planned is the batch that the script drew first"
        )
        return {}
    try:
        index, seen, is_uniform = largest(dataset)
    except Exception as error:  # noqa: BLE001  the script's own data may fail in any way
        note(f"the data set could not be looked at for its largest sample: {error}")
        return {}
    if is_uniform or index is None:
        return {}
    note(
        f"samples differ in size: planned is a batch of the largest of {seen} that were looked at, "
        f"number {index}"
    )
    if size is not None:
        return {"batch_sampler": WorstBatches(sampler, size, index)}
    return {"sampler": [index] * len(dataset), "shuffle": False}


def largest(dataset: Any) -> tuple[int | None, int, bool]:
    """Return the number of the largest sample, how many were looked at, and if all were alike."""
    ends_at = time.monotonic() + LOOK_S
    sizes: list[int] = []
    for index in range(min(len(dataset), MOST_SAMPLES)):
        sizes.append(tensor_bytes(dataset[index]))
        is_uniform = len(sizes) == ALIKE and len(set(sizes)) == 1
        if is_uniform or time.monotonic() > ends_at:
            break
    if not sizes:
        return None, 0, True
    return sizes.index(max(sizes)), len(sizes), len(set(sizes)) == 1


def _is_indexed(dataset: Any) -> bool:
    return hasattr(type(dataset), "__getitem__") and hasattr(type(dataset), "__len__")
