"""Where in a stream a block's forward runs, when its backward wants it, and what the loss holds."""

import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from math import prod

from flatout.memory.edits import Life, lives_of
from flatout.memory.stream import Component, MemoryStream, Phase

BLOCK = re.compile(r"(?:[^.]*[^.\d][^.]*\.)*?\d+(?=\.|$)")
"""A module's name up to its first number: what a model repeats."""
SOFTMAX = "_log_softmax"
"""The operator of the loss that holds a row of chances for every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One forward of one block."""

    block: str
    inner: tuple[int, ...]
    """Its activations but the last, which is its result."""
    end: int
    """Position of the event right after its forward."""
    wanted: int
    """Position of the event before which its backward has them again."""


def block_of(module: str) -> str:
    """Return the block that a module belongs to; empty outside of all.

    >>> block_of("transformer.h.11.attn"), block_of("layer1.0"), block_of("lm_head")
    ('transformer.h.11', 'layer1.0', '')
    """
    match = BLOCK.match(module)
    return match[0] if match else ""


def regions_of(stream: MemoryStream) -> list[Region]:
    """Return every forward of every block that has activations to give up."""
    lives = lives_of(stream)
    starts = [mark.at for mark in stream.marks]
    windows: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for index, allocation in enumerate(stream.allocations):
        block = block_of(allocation.module)
        is_kept = allocation.component is Component.ACTIVATIONS
        if block and is_kept and allocation.phase is Phase.FORWARD:
            window = bisect_right(starts, lives[index].birth)
            windows[window, block].append(index)
    found = []
    for (_window, block), indices in windows.items():
        region = _region(stream, lives, block, indices)
        if region is not None:
            found.append(region)
    return found


def loss_indices(stream: MemoryStream) -> list[int]:
    """Return the allocations as large as a row of chances for every token, whatever their type."""
    shapes = {
        (a.shape[-1], prod(a.shape))
        for a in stream.allocations
        if SOFTMAX in a.operator and "backward" not in a.operator and len(a.shape) >= 2
    }
    if not shapes:
        return []
    columns, count = max(shapes, key=lambda shape: shape[1])
    return [
        index
        for index, a in enumerate(stream.allocations)
        if a.phase in (Phase.FORWARD, Phase.BACKWARD)
        and a.component in (Component.ACTIVATIONS, Component.TEMPORARIES)
        and a.shape
        and a.shape[-1] == columns
        and count // 2 <= prod(a.shape) <= count
    ]


def _region(
    stream: MemoryStream, lives: list[Life], block: str, indices: list[int]
) -> Region | None:
    last_birth = max(lives[index].birth for index in indices)
    *inner, _result = sorted(indices, key=lambda index: lives[index].birth)
    deaths = [lives[index].death for index in inner]
    known = [death for death in deaths if death is not None]
    if not inner or len(known) < len(deaths):
        return None
    wanted = min(known)
    if _phase_at(stream, wanted) is not Phase.BACKWARD:
        return None
    return Region(block=block, inner=tuple(inner), end=last_birth + 1, wanted=wanted)


def _phase_at(stream: MemoryStream, position: int) -> Phase:
    phase = Phase.SETUP
    for mark in stream.marks:
        if mark.at > position:
            break
        phase = mark.phase
    return phase
