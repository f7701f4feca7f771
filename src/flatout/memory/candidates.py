"""The levers that a plan considers: what each makes of the stream, and what it costs in time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from flatout.memory import transforms
from flatout.memory.allocator_settings import AllocatorSettings
from flatout.memory.ground import Ground, is_half
from flatout.memory.regions import SOFTMAX, loss_indices, regions_of
from flatout.memory.stream import Component, MemoryStream, Phase

FORWARD_SHARE = 1 / 3
"""Of a step's FLOPs: a product costs one in the forward and two in the backward."""
CHUNKS = 8
RANK = 16
"""Of LoRA: the default of its authors' larger models, and of peft's examples."""
AMPERE = (8, 0)
"""The first compute capability with bf16."""
READS_GRADIENTS = ("aten._foreach_norm", "aten.linalg_vector_norm", "aten.reciprocal")
"""Operators that make one number between backward and update: the norms that clipping takes, and
the inverse scale of a GradScaler."""
LARGE_LOSS = 0.05
"""The loss is worth a chunked one where its logits are this share of all activations."""

Cost = Callable[[MemoryStream, Ground], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One lever."""

    label: str
    """`technique setting=value`, or what to change by hand."""
    change: Callable[[MemoryStream], MemoryStream]
    cost: Cost
    """Step time with it over that without."""
    why: str
    changes_training: bool = False
    settings: AllocatorSettings | None = None
    """Another allocator's, where the lever is one of it."""
    helps: Callable[[MemoryStream, Ground], bool] = lambda *_: True
    """Tells whether there is anything to win."""


def candidates(ground: Ground) -> list[Candidate]:
    """Return all levers for this device, without those of several GPUs where there is one."""
    expandable = replace(ground.settings, expandable_segments=True)
    found = [
        Candidate(
            label="expandable_segments",
            change=_unchanged,
            cost=_free,
            why="segments grow instead of being asked for anew: less lies unused",
            settings=expandable,
            helps=lambda _, here: not here.settings.expandable_segments,
        ),
        Candidate(
            label="fused_optimizer",
            change=transforms.without_optimizer_temporaries,
            cost=_free,
            why="the update makes no temporaries",
            helps=_has_optimizer_temporaries,
        ),
        Candidate(
            label="optimizer_in_backward",
            change=transforms.optimizer_in_backward,
            cost=_free,
            why="each gradient is used and freed at once; not with accumulation or clipping",
            helps=_may_step_in_backward,
        ),
        Candidate(
            label="bf16_autocast",
            change=transforms.half_precision,
            cost=_half_cost,
            why="products in bf16: half the bytes of what they make, tensor cores",
            helps=_may_be_half,
        ),
        Candidate(
            label="chunked_cross_entropy",
            change=partial(transforms.chunked_loss, chunks=CHUNKS),
            cost=_free,
            why="the probabilities of all tokens never exist at once",
            helps=_has_large_loss,
        ),
        *_checkpointing(),
        Candidate(
            label="activation_offload",
            change=transforms.offloaded,
            cost=_offload_cost,
            why="activations wait in the host's memory; the link is the limit",
            helps=_has_blocks,
        ),
    ]
    return [*found, *_other_trainings(), *(_sharding(ground) if ground.gpus > 1 else ())]


def _checkpointing() -> list[Candidate]:
    return [
        Candidate(
            label="activation_checkpointing mode=selective",
            change=transforms.selectively_checkpointed,
            cost=partial(_recompute_cost, keeps_expensive=True),
            why="all but the results of products is made again: traffic, hardly any FLOPs",
            helps=_has_blocks,
        ),
        Candidate(
            label="activation_checkpointing mode=budget",
            change=_half_checkpointed,
            cost=lambda stream, ground: 1 + (_recompute_cost(stream, ground) - 1) / 2,
            why="half of the blocks is run twice",
            helps=_has_blocks,
        ),
        Candidate(
            label="activation_checkpointing mode=full",
            change=transforms.checkpointed,
            cost=_recompute_cost,
            why="every block is run twice: its share of the forward's FLOPs is paid again",
            helps=_has_blocks,
        ),
    ]


def _other_trainings() -> list[Candidate]:
    return [
        Candidate(
            label="eight_bit_optimizer",
            change=transforms.eight_bit_optimizer,
            cost=_free,
            why="optimizer state in one byte a number; another optimizer",
            changes_training=True,
            helps=_has_state,
        ),
        Candidate(
            label="adafactor",
            change=transforms.adafactor,
            cost=_free,
            why="no first moment, a factored second; another optimizer",
            changes_training=True,
            helps=_has_state,
        ),
        Candidate(
            label=f"lora rank={RANK}",
            change=partial(transforms.low_rank, rank=RANK),
            cost=_free,
            why="only thin matrices are trained; another training",
            changes_training=True,
        ),
    ]


def _sharding(ground: Ground) -> list[Candidate]:
    words = {
        1: "optimizer state is spread",
        2: "optimizer state and gradients are spread",
        3: "parameters are spread too and fetched twice a step",
    }
    return [
        Candidate(
            label=f"zero stage={stage} gpus={ground.gpus} (by hand)",
            change=partial(transforms.sharded, stage=stage, shards=ground.gpus),
            cost=partial(_sharding_cost, stage=stage),
            why=f"{words[stage]} over {ground.gpus} GPUs; traffic that nothing hides is assumed",
        )
        for stage in (1, 2, 3)
    ]


def _may_step_in_backward(stream: MemoryStream, ground: Ground) -> bool:
    """Tell whether a gradient may be used when it comes.

    Not where ranks have yet to average it, another backward adds to it, or all are read at once.
    """
    last = stream.steps - 1
    if ground.gpus > 1 or any(each.operator == transforms.BUCKETS for each in stream.allocations):
        return False
    backwards = sum(mark.phase is Phase.BACKWARD and mark.step == last for mark in stream.marks)
    is_read = any(
        each.step == last
        and each.phase in (Phase.BACKWARD, Phase.OPTIMIZER)
        and not each.shape
        and each.operator.startswith(READS_GRADIENTS)
        for each in stream.allocations
    )
    return backwards == 1 and not is_read


def _half_checkpointed(stream: MemoryStream) -> MemoryStream:
    """Checkpoint the half of the blocks that holds most: FLOPs are taken to follow bytes."""
    held: dict[str, int] = {}
    for region in regions_of(stream):
        size = sum(stream.allocations[index].size for index in region.inner)
        held[region.block] = held.get(region.block, 0) + size
    order = sorted(held, key=lambda block: -held[block])
    return transforms.checkpointed(stream, order[: -(-len(order) // 2)])


def _unchanged(stream: MemoryStream) -> MemoryStream:
    return stream


def _free(_stream: MemoryStream, _ground: Ground) -> float:
    return 1.0


def _recompute_cost(
    stream: MemoryStream, ground: Ground, *, keeps_expensive: bool = False
) -> float:
    """Return the ratio from the FLOPs of the share of activations that is made again."""
    keeps = transforms.is_expensive if keeps_expensive else _nothing
    again = transforms.recomputed(stream, keeps=keeps)
    added = ground.traffic_s(sum(allocation.size for allocation in again))
    if not keeps_expensive:
        total = _activations(stream) or 1
        share = min(1.0, sum(allocation.size for allocation in again) / total)
        added += share * FORWARD_SHARE * stream.model_flops / ground.flops_per_s(stream)
    return _with_added(stream, ground, added)


def _offload_cost(stream: MemoryStream, ground: Ground) -> float:
    """Return the ratio where copies hide behind the step as far as they are shorter than it."""
    moved = sum(allocation.size for allocation in transforms.recomputed(stream))
    step = ground.step_s(stream)
    return max(1.0, moved / ground.gpu.host_bandwidth * 2 / step) if step else 1.0


def _half_cost(stream: MemoryStream, ground: Ground) -> float:
    """Return the ratio of the arithmetic in bf16; traffic is left as it is."""
    step = ground.step_s(stream)
    saved = stream.model_flops / ground.flops_per_s(stream)
    saved -= stream.model_flops / ground.half_flops_per_s
    return 1 - saved / step if step else 1.0


def _may_be_half(stream: MemoryStream, ground: Ground) -> bool:
    capability = ground.gpu.compute_capability
    return (capability is None or capability >= AMPERE) and not is_half(stream)


def _sharding_cost(stream: MemoryStream, ground: Ground, stage: int) -> float:
    """Return the ratio beside plain data parallelism, which reduces gradients anyway."""
    if stage < 3:
        return 1.0
    parameters = sum(a.size for a in stream.allocations if a.component is Component.PARAMETERS)
    again = parameters * (ground.gpus - 1) / ground.gpus
    return _with_added(stream, ground, again / ground.gpu.peer_bandwidth)


def _with_added(stream: MemoryStream, ground: Ground, added_s: float) -> float:
    step = ground.step_s(stream)
    return 1 + added_s / step if step else 1.0


def _activations(stream: MemoryStream) -> int:
    last = stream.steps - 1
    return sum(
        a.size
        for a in stream.allocations
        if a.component is Component.ACTIVATIONS and a.step == last
    )


def _nothing(_allocation: object) -> bool:
    return False


def _has_blocks(stream: MemoryStream, _ground: Ground) -> bool:
    return bool(regions_of(stream))


def _has_state(stream: MemoryStream, _ground: Ground) -> bool:
    return any(a.component is Component.OPTIMIZER and a.shape for a in stream.allocations)


def _has_optimizer_temporaries(stream: MemoryStream, _ground: Ground) -> bool:
    return transforms.without_optimizer_temporaries(stream).alive() != stream.alive()


def _has_large_loss(stream: MemoryStream, _ground: Ground) -> bool:
    indices = loss_indices(stream)
    size = sum(stream.allocations[i].size for i in indices if SOFTMAX in _operator(stream, i))
    return size > LARGE_LOSS * _activations(stream) > 0


def _operator(stream: MemoryStream, index: int) -> str:
    return stream.allocations[index].operator
