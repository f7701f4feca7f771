"""What a memory technique would change in a traced stream: stated models.

They stand in for a trace where a technique cannot be traced; each function says what it assumes.
`regions_of` and `loss_indices` find blocks and losses in a stream.
"""

import functools
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod

from flatout.hardware.catalogue import GpuModel
from flatout.records.memory_stream import (
    Allocation,
    Component,
    Draft,
    Life,
    MemoryStream,
    Phase,
    lives_of,
    step_bounds,
)
from flatout.records.messages import words

BLOCK = re.compile(r"(?:[^.]*[^.\d][^.]*\.)*?\d+(?=\.|$)")
"""A module's name up to its first number: what a model repeats."""
SOFTMAX = "_log_softmax"
"""The operator of the loss that holds a row of chances for every token."""

REACHED_HALF, REACHED_FULL = 0.4, 0.8
"""Shares of the arithmetic peak that a step is taken to reach, on tensor cores (in half precision,
or in TF32) and without them: assumed, until a profile says what a training reaches. They cancel in
most ratios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRegion:
    """One forward of one block.

    Where it runs in a stream, and when its backward wants what it made.
    """

    block: str
    inner: tuple[int, ...]
    """Its activations but the last, which is its result."""
    end: int
    """Position of the event right after its forward."""
    wanted: int
    """Position of the event before which its backward has them again."""


@functools.lru_cache(1 << 12)
def block_of(module: str) -> str:
    """Return the block that a module belongs to; empty outside of all.

    >>> block_of("transformer.h.11.attn"), block_of("layer1.0"), block_of("lm_head")
    ('transformer.h.11', 'layer1.0', '')
    """
    match = BLOCK.match(module)
    return match[0] if match else ""


def regions_of(stream: MemoryStream) -> list[BlockRegion]:
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
    found = (_region(stream, lives, block, indices) for (_, block), indices in windows.items())
    return [region for region in found if region is not None]


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
) -> BlockRegion | None:
    last_birth = max(lives[index].birth for index in indices)
    *inner, _result = sorted(indices, key=lambda index: lives[index].birth)
    deaths = [lives[index].death for index in inner]
    known = [death for death in deaths if death is not None]
    if not inner or len(known) < len(deaths):
        return None
    wanted = min(known)
    if _phase_at(stream, wanted) is not Phase.BACKWARD:
        return None
    return BlockRegion(block=block, inner=tuple(inner), end=last_birth + 1, wanted=wanted)


def _phase_at(stream: MemoryStream, position: int) -> Phase:
    before = [mark.phase for mark in stream.marks if mark.at <= position]
    return before[-1] if before else Phase.SETUP


FP32_BYTES = 4
BUCKETS = "buckets"
"""The operator of what data parallelism reduces gradients in."""
HALF = ("bfloat16", "float16")
EXPENSIVE = ("mm", "linear", "attention", "convolution")
"""Results of such operators are kept by selective checkpointing: they cost FLOPs to make again."""
BUCKETS_ASSUMED = "plan.buckets"
"""The message on a script that makes none itself."""


def without_optimizer_temporaries(stream: MemoryStream) -> MemoryStream:
    """Fused optimizer: one kernel updates in place, nothing is made on the way."""
    draft = Draft(stream)
    for index, allocation in enumerate(stream.allocations):
        if allocation.phase is Phase.OPTIMIZER and allocation.component is Component.TEMPORARIES:
            draft.drop(index)
    return draft.build()


def with_buckets(stream: MemoryStream) -> MemoryStream:
    """Data parallelism: buckets hold a second copy of the gradients from the first backward on.

    That is torch's default; with `gradient_as_bucket_view=True` there is one copy only. A script
    that spreads itself is left as it was traced: with its own buckets, or with FSDP's shards.
    """
    if stream.spreads_itself:
        return stream
    gradients = [a for a in stream.allocations if a.component is Component.GRADIENTS]
    start = next((mark.at for mark in stream.marks if mark.phase is Phase.FORWARD), None)
    if not gradients or start is None:
        return stream
    size = gradient_bytes(stream)
    draft = Draft(stream)
    bucket = replace(
        gradients[0], size=size, operator=BUCKETS, module="", line="", shape=(), step=0
    )
    draft.add(replace(bucket, component=Component.TEMPORARIES), start, None)
    return draft.build(words(BUCKETS_ASSUMED))


def gradient_bytes(stream: MemoryStream) -> int:
    """Return the bytes of the gradients of one step; those set to zero stay from the first one."""
    made: defaultdict[int, int] = defaultdict(int)
    again = {*second_copies(stream)}
    for index, allocation in enumerate(stream.allocations):
        if allocation.component is Component.GRADIENTS and index not in again:
            made[allocation.step] += allocation.size
    return max(made.values(), default=0)


def holds_shards(stream: MemoryStream) -> bool:
    """Return whether the script keeps a part of its model on each rank: it reduces no buckets.

    What was traced is then one rank's part, from which the whole model cannot be said.
    """
    return stream.spreads_itself and not any(a.operator == BUCKETS for a in stream.allocations)


def accumulated(stream: MemoryStream) -> MemoryStream:
    """A step in several micro-batches: gradients of the ones before are there from its start on.

    What a later one makes is added to them and gone at once. Stated of every step's only backward.
    """
    draft = Draft(stream)
    for index, allocation in enumerate(stream.allocations):
        if allocation.component is not Component.GRADIENTS or allocation.operator == BUCKETS:
            continue
        start, end = step_bounds(stream, allocation.step)
        birth, death = draft.lives[index]
        if birth <= start:
            continue
        draft.drop(index)
        draft.add(allocation, start, None if death is None else min(death, end))
        draft.add(replace(allocation, component=Component.TEMPORARIES), birth, birth + 1)
    return draft.build()


def second_copies(stream: MemoryStream) -> list[int]:
    """Return the buckets that hold gradients once more, which ZeRO does without from stage 2 on.

    None where gradients are views of the buckets: then these are the only copy.
    """
    buckets = [index for index, a in enumerate(stream.allocations) if a.operator == BUCKETS]
    has_others = any(
        a.component is Component.GRADIENTS and a.operator != BUCKETS for a in stream.allocations
    )
    return buckets if has_others else []


def gathered_bytes(stream: MemoryStream) -> tuple[int, int]:
    """Return what ZeRO's stage 3 has whole at most: of the root, and of its blocks.

    FSDP keeps what is outside the blocks from the first forward to the last backward, and of the
    blocks the one that computes and the one that is fetched: at most the two largest.
    """
    sizes: defaultdict[str, int] = defaultdict(int)
    for allocation in stream.allocations:
        if allocation.component is Component.PARAMETERS:
            sizes[block_of(allocation.module)] += allocation.size
    root = sizes.pop("", 0)
    return root, sum(sorted(sizes.values())[-2:])


def sharded(stream: MemoryStream, stage: int, shards: int) -> MemoryStream:
    """ZeRO: optimizer state, from stage 2 on gradients, with 3 parameters, spread over GPUs."""
    result = stream
    for part in (Component.OPTIMIZER, Component.GRADIENTS, Component.PARAMETERS)[:stage]:
        result = resized(result, part, lambda allocation: -(-allocation.size // shards))
    draft = Draft(result)
    for index, allocation in enumerate(result.allocations):
        if allocation.phase is Phase.OPTIMIZER and allocation.component is Component.TEMPORARIES:
            draft.resize(index, -(-allocation.size // shards))
    if stage > 1:
        for index in second_copies(stream):
            draft.drop(index)
    if stage > 2:
        start = next((mark.at for mark in stream.marks if mark.phase is not Phase.SETUP), 0)
        whole = Allocation(
            size=sum(gathered_bytes(stream)),
            component=Component.TEMPORARIES,
            phase=Phase.SETUP,
            step=0,
            operator="all_gather",
        )
        draft.add(whole, start, None)
    return draft.build()


def checkpointed(
    stream: MemoryStream,
    blocks: Collection[str] | None = None,
    keeps: Callable[[Allocation], bool] = lambda _: False,
) -> MemoryStream:
    """A block's activations are thrown away after its forward and made again for its backward.

    The block's result stays: it is the next block's input. All of a block's activations come back
    at once, before the first of them is used.

    `blocks` are names of modules, None for all that repeat; what it `keeps` stays nevertheless.
    """
    draft = Draft(stream)
    for region in regions_of(stream):
        for index in region.inner if blocks is None or region.block in blocks else ():
            allocation, death = stream.allocations[index], draft.lives[index].death
            if death is not None and not keeps(allocation):
                draft.die_before(index, region.end)
                # The second life ends with the first one, as it was traced.
                draft.add(replace(allocation, phase=Phase.BACKWARD), region.wanted, death + 1)
    return draft.build()


def is_expensive(allocation: Allocation) -> bool:
    """Return whether making a result again would cost FLOPs."""
    return any(word in allocation.operator for word in EXPENSIVE)


def recomputed(
    stream: MemoryStream, keeps: Callable[[Allocation], bool] = lambda _: False
) -> list[Allocation]:
    """Return the activations of one step that checkpointing would make again."""
    last = stream.steps - 1
    return [
        stream.allocations[index]
        for region in regions_of(stream)
        for index in region.inner
        if stream.allocations[index].step == last and not keeps(stream.allocations[index])
    ]


def resized(
    stream: MemoryStream, part: Component, size: Callable[[Allocation], int]
) -> MemoryStream:
    """Return the stream with other sizes of all allocations of one component."""
    draft = Draft(stream)
    for index, allocation in enumerate(stream.allocations):
        if allocation.component is part:
            draft.resize(index, size(allocation))
    return draft.build()


def is_half(stream: MemoryStream) -> bool:
    """Return whether most bytes that products make are of half precision."""
    made = [a for a in stream.allocations if "mm" in a.operator or "convolution" in a.operator]
    half = sum(a.size for a in made if a.dtype in HALF)
    return 2 * half > sum(a.size for a in made)


def reached_flops(gpu: GpuModel, stream: MemoryStream) -> float:
    """Return the operations a second that a step is taken to reach, in its precision."""
    if is_half(stream):
        return REACHED_HALF * gpu.bf16_flops
    full = REACHED_FULL * gpu.fp32_flops
    tf32 = max(full, REACHED_HALF * gpu.tf32_flops)
    return 1 / (stream.tf32_share / tf32 + (1 - stream.tf32_share) / full)


def has_state(stream: MemoryStream) -> bool:
    """Return whether the optimizer keeps tensors."""
    return any(a.component is Component.OPTIMIZER and a.shape for a in stream.allocations)


def activation_size(stream: MemoryStream) -> int:
    """Return the bytes of all activations of the last step."""
    last = stream.steps - 1
    return sum(
        a.size
        for a in stream.allocations
        if a.component is Component.ACTIVATIONS and a.step == last
    )
