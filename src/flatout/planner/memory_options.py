"""The techniques that a plan considers: what each makes of the stream, and what it costs in time.

Ways to make a step fit, the fastest that fits first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from flatout.planner import transforms
from flatout.planner.allocator_settings import AllocatorSettings
from flatout.planner.device_model import Ground, is_half
from flatout.planner.largest_batch import Accumulation, accumulation, largest_steady_batch
from flatout.planner.replay import Replay, replay
from flatout.planner.stream import Component, MemoryStream, Phase
from flatout.planner.transforms import SOFTMAX, loss_indices, regions_of
from flatout.records.plan import Rung, Source

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
    """One technique."""

    label: str
    """`technique setting=value`, or what to change by hand."""
    change: Callable[[MemoryStream], MemoryStream]
    cost: Cost
    """Step time with it over that without."""
    why: str
    changes_training: bool = False
    settings: AllocatorSettings | None = None
    """Another allocator's, where the technique is one of it."""
    helps: Callable[[MemoryStream, Ground], bool] = lambda *_: True
    """Tells whether there is anything to win."""


def candidates(ground: Ground) -> list[Candidate]:
    """Return all techniques for this device, without those of several GPUs where there is one."""
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
    """Return whether a gradient may be used when it comes.

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


MOST_TOGETHER = 6
"""Techniques put together at most: what does not fit then does not fit by techniques."""
MOST_BATCHES = 4
"""Ways of which the largest batch is looked for, each by several replays."""
SPLIT_RECOMPUTE = 1 / 3
"""What microbatching at the script level pays: each part's forward is run again."""

At = Callable[[int], MemoryStream]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is planned.

    The stream at every batch, where it is, and what was traced of techniques.
    """

    stream: MemoryStream
    """At the planned batch, with workspaces."""
    ground: Ground
    at: At | None = None
    """The same at another batch, where that can be said."""
    traced: Mapping[str, MemoryStream] = field(default_factory=dict)
    """Streams of techniques that were traced for real, by label."""
    refused: frozenset[str] = frozenset()
    """Labels of techniques that were tried and do not apply."""
    largest: int | None = None
    """The largest batch of the step as it is, where it was looked for already."""
    finds_batches: bool = False
    """Whether the largest batch of each way that fits is looked for."""


def ladder(setup: Setup) -> tuple[Rung, ...]:
    """Return the step as it is and every way that saves memory."""
    base = _played(setup, setup.stream, None)
    as_is = _rung(setup, (), base, base, why="the script as it is")
    options = [
        option
        for option in candidates(setup.ground)
        if option.helps(setup.stream, setup.ground) and option.label not in setup.refused
    ]
    rungs = [_single(setup, option, base) for option in options]
    rungs += _smaller_batches(setup, base)
    rungs = [rung for rung in rungs if rung.saved_bytes > 0]
    if not any(rung.fits and not rung.changes_training for rung in (as_is, *rungs)):
        rungs += _together(setup, options, rungs, base)
    ways = sorted((as_is, *rungs), key=_order)
    by_label = {option.label: option for option in options}
    return tuple(
        _with_batch(setup, rung, by_label) if number < MOST_BATCHES else rung
        for number, rung in enumerate(ways)
    )


def _with_batch(setup: Setup, rung: Rung, by_label: Mapping[str, Candidate]) -> Rung:
    """Return the way with the largest batch that it allows, where that is asked and known."""
    if not (rung.fits and setup.finds_batches and all(c in by_label for c in rung.choices)):
        return rung
    if not rung.choices and setup.largest is not None:
        return replace(rung, largest_batch=setup.largest)
    return replace(rung, largest_batch=_largest(setup, [by_label[c] for c in rung.choices]))


def _order(rung: Rung) -> tuple[bool, bool, float, bool, int]:
    """Sort what fits first, then what trains the same, then by time, then what changes less.

    Of what does not fit the smallest comes first: its time is of no use.
    """
    time = round(rung.time_ratio, 2) if rung.fits else 0.0
    is_change = bool(rung.choices) and rung.fits
    return not rung.fits, rung.changes_training, time, is_change, rung.peak_bytes


def _single(setup: Setup, option: Candidate, base: Replay) -> Rung:
    stream = setup.traced.get(option.label)
    changed = option.change(setup.stream) if stream is None else stream
    found = _played(setup, changed, option)
    source = Source.ASSUMED
    if stream is not None:
        source = Source.TRACED
    elif option.settings is not None:
        source = Source.SIMULATED
    return Rung(
        choices=(option.label,),
        peak_bytes=found.peak_reserved + setup.ground.outside.bytes,
        saved_bytes=base.peak_reserved - found.peak_reserved,
        time_ratio=option.cost(setup.stream, setup.ground),
        fits=found.fits,
        why=option.why,
        source=source,
        changes_training=option.changes_training,
    )


def _together(
    setup: Setup, options: Sequence[Candidate], singles: Sequence[Rung], base: Replay
) -> list[Rung]:
    """Add techniques one at a time, the cheapest byte first, until it fits."""
    by_label = {option.label: option for option in options}
    alone = [r for r in singles if r.choices[0] in by_label and not r.changes_training]
    alone.sort(key=lambda rung: ((rung.time_ratio - 1) / rung.saved_bytes, -rung.saved_bytes))
    saved = {rung.choices[0]: rung.saved_bytes for rung in alone}
    chosen: list[Candidate] = []
    latest: list[Rung] = []
    for rung in alone:
        option = by_label[rung.choices[0]]
        rivals = [one for one in chosen if _excludes(option, one)]
        if any(saved[one.label] >= rung.saved_bytes for one in rivals):
            continue
        # A stronger setting of what was chosen takes its place.
        chosen = [*(one for one in chosen if one not in rivals), option]
        if len(chosen) < 2 or len(chosen) > MOST_TOGETHER:
            continue
        found = _played(setup, _changed(setup.stream, chosen), *chosen)
        cost = 1 + sum(one.cost(setup.stream, setup.ground) - 1 for one in chosen)
        labels = tuple(one.label for one in chosen)
        latest = [_rung(setup, labels, found, base, ratio=cost, why="all of them together")]
        if found.fits:
            break
    return latest


def _excludes(one: Candidate, other: Candidate) -> bool:
    """Return whether two techniques are two settings of one, or do the same work."""
    groups = (
        ("activation_checkpointing", "activation_offload"),
        ("fused_optimizer", "optimizer_in_backward"),
        ("zero",),
    )
    return any(one.label.startswith(group) and other.label.startswith(group) for group in groups)


def _changed(stream: MemoryStream, options: Sequence[Candidate]) -> MemoryStream:
    for option in options:
        stream = option.change(stream)
    return stream


def _smaller_batches(setup: Setup, base: Replay) -> Iterator[Rung]:
    """Yield the step with its batch in parts: by the user's loop, and by the technique."""
    batch = setup.stream.batch
    if setup.at is None or batch is None or batch < 2:
        return
    for split in _splits(batch):
        found = _played(setup, setup.at(split.micro_batch), None)
        if found.fits:
            break
    label = f"batch={split.micro_batch} accumulate={split.steps} (by hand)"
    why = "the same samples a step; smaller kernels may be slower, which is not counted"
    yield _rung(setup, (label,), found, base, why=why)
    yield _rung(
        setup,
        (f"microbatching chunks={split.steps}",),
        found,
        base,
        ratio=1 + SPLIT_RECOMPUTE,
        why="the loop stays as it is; each part's forward is run again",
    )


def _splits(batch: int) -> Iterator[Accumulation]:
    """Yield ever more and smaller micro-batches, down to single samples."""
    size = batch
    while size > 1:
        split = accumulation(batch, size // 2)
        assert split is not None
        size = split.micro_batch
        yield split


def _rung(
    setup: Setup,
    choices: tuple[str, ...],
    found: Replay,
    base: Replay,
    *,
    ratio: float = 1.0,
    why: str,
) -> Rung:
    return Rung(
        choices=choices,
        peak_bytes=found.peak_reserved + setup.ground.outside.bytes,
        saved_bytes=base.peak_reserved - found.peak_reserved,
        time_ratio=ratio,
        fits=found.fits,
        why=why,
        source=Source.ASSUMED if choices else Source.TRACED,
    )


def _played(setup: Setup, stream: MemoryStream, *options: Candidate | None) -> Replay:
    """Return the replay on the device; of what does not fit, with its peak on an endless one."""
    settings = setup.ground.settings
    for option in options:
        if option is not None and option.settings is not None:
            settings = option.settings
    found = replay(stream, settings, capacity=setup.ground.limit(stream))
    if found.fits:
        return found
    endless = replay(stream, settings)
    return Replay(
        peak_allocated=endless.peak_allocated,
        peak_reserved=endless.peak_reserved,
        peak_at=endless.peak_at,
        retries_by_step=found.retries_by_step,
        full_at=found.full_at,
    )


def _largest(setup: Setup, options: Sequence[Candidate]) -> int | None:
    """Return the largest batch without retries, by the model of the techniques."""
    at = setup.at
    if at is None or not setup.finds_batches or any(c.label in setup.traced for c in options):
        return None
    settings = setup.ground.settings
    for option in options:
        settings = option.settings or settings

    def changed(batch: int) -> MemoryStream:
        return _changed(at(batch), options)

    return largest_steady_batch(changed, setup.ground.limit(setup.stream), settings)
