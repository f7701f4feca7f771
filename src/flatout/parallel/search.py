"""Ways to spread a training over ranks: listed, rejected, timed, and explained. Pure.

All of it comes from one stream of allocations, traced on one device: what a stage, a part of every
product or a shard of the states takes is cut out of it. The global batch stays what it is.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from flatout.analysis.stream_changes import reached_flops
from flatout.hardware.catalogue import GpuModel
from flatout.parallel.cost import DeviceCosts, Link, StepCost, StepWork, offload_s, step_cost
from flatout.parallel.rank_share import Layout, StreamColumns, layout_of
from flatout.records.memory_stream import MemoryStream
from flatout.records.messages import words
from flatout.records.parallel import ParallelSpec, microbatches_for, spec_for
from flatout.records.plan import NumberSource, ParallelAdvice, ParallelPlan, TaggedNumber
from flatout.records.profile import Profile
from flatout.records.units import format_bytes, format_ms, format_share

START_S = 1e-5
"""Host time of one operator in eager torch, its kernel's launch included. Assumed: torch's own
profiler shows 5 to 20 us on today's hosts."""
MEMORY_PASSES = 3
"""Times that a tensor passes the memory: written once, read by what follows and by backward."""
STEPPED_BYTES = 28
"""That AdamW moves of each parameter in fp32: four numbers read, three written."""
OVERLAP = 0.5
"""Share of the gradients' exchange that backward hides where no probe measured it: assumed."""
NETWORK = Link(latency_s=2e-5, bytes_per_s=12.5e9, source=NumberSource.ASSUMED, overlap=OVERLAP)
"""Between hosts, for all GPUs of a host together: 100 Gbit/s Ethernet, assumed."""
PEER_LATENCY_S = 1e-5
"""Of one hop between GPUs of a host: what NCCL's small messages take, assumed."""
PEER_REACHED = 0.8
"""Share of the data sheet's bandwidth between GPUs that a large exchange reaches; on vTrain's A100
table it is 0.76 for 1 GiB over 8 GPUs."""
SLOW_BYTES_PER_S = 64e9
"""A link of PCIe 5.0 with 16 lanes: what is not faster is called slow next to NVLink."""
LEAST_GAIN = 1.2
"""More GPUs that make a step less than so many times faster are not worth it."""
FEW_SAMPLES = 2
"""Samples of a rank below which a larger global batch is what is missing."""
MOST_MICROBATCHES = 64
MOST_RANKS = 4096
"""Where the search for enough GPUs ends."""
TENSOR_REDUCES = 4
"""All-reduces of a block and a microbatch, two in forward and two in backward; with sequence
parallelism each is a reduce-scatter and an all-gather, which sends as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The ranks that there are, and what joins them."""

    gpus: int
    """Of each host."""
    hosts: int
    inside: Link
    """Between the GPUs of a host."""
    between: Link = NETWORK
    """Between hosts, for all GPUs of a host together."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.gpus * self.hosts

    def link(self, stride: int, size: int) -> Link:
        """Return the link of a group whose members are `stride` ranks apart.

        Groups that cross hosts share the hosts' adapters.
        """
        if stride * size <= self.gpus:
            return self.inside
        sharing = min(stride, self.gpus)
        return replace(self.between, bytes_per_s=self.between.bytes_per_s / sharing)


def inside_of(gpu: GpuModel) -> Link:
    """Return the link between GPUs of one host by the data sheet."""
    return Link(
        latency_s=PEER_LATENCY_S,
        bytes_per_s=PEER_REACHED * gpu.peer_bandwidth,
        source=NumberSource.ASSUMED,
        overlap=OVERLAP,
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is to be spread."""

    at: Callable[[int], MemoryStream]
    """The step on one device at a batch."""
    batch: int
    """The global batch; of a step in micro-batches one of them, over all ranks."""
    gpu: GpuModel
    limit_bytes: int
    """What the allocator may take at most on a device."""
    outside_bytes: int = 0
    """What a process takes besides."""
    reserved_ratio: float = 1.0
    """Reserved over allocated bytes, as the simulated allocator has it on one device."""
    splits_layers: bool = False
    """Whether the model may be split by layers and products: a Task may, a script may not."""
    profile: Profile | None = None
    """Of the training on such devices, one or several."""
    micro_batches: int = 1
    """Of a step, by the script's own loop."""

    @property
    def step_samples(self) -> int:
        """Samples of a step over all ranks."""
        return self.batch * self.micro_batches

    @property
    def room_bytes(self) -> int:
        """What a process may take at most."""
        return self.limit_bytes + self.outside_bytes

    @cached_property
    def layout(self) -> "Layout":
        """Where the blocks are."""
        return layout_of(self.at(self.batch))

    @cached_property
    def costs(self) -> DeviceCosts:
        """The device's constants: by the data sheet, scaled to the profile where there is one."""
        sheet = DeviceCosts(
            s_per_flop=1 / reached_flops(self.gpu, self.at(self.batch)),
            s_per_byte=MEMORY_PASSES / self.gpu.bandwidth,
            s_per_start=START_S,
            s_per_parameter=STEPPED_BYTES / self.gpu.bandwidth,
        )
        profile = self.profile
        if profile is None:
            return sheet
        # The time of a step is one rank's, and so are the samples that belong to it.
        size = round(profile.samples_per_step_per_rank / self.micro_batches)
        columns = self.columns(size or self.batch)
        step_s = profile.step_ms.median / 1e3
        scale = profile.share("forward", "backward") * step_s
        scale /= sheet.work_s(columns.work(ParallelSpec(), 0))
        return DeviceCosts(
            s_per_flop=scale * sheet.s_per_flop,
            s_per_byte=scale * sheet.s_per_byte,
            s_per_start=scale * sheet.s_per_start,
            s_per_parameter=profile.share("optimizer")
            * step_s
            / columns.stepped_on(ParallelSpec()),
            step_s=profile.share("h2d", "other") * step_s,
            source=NumberSource.CALIBRATED,
        )

    @cached_property
    def _columns(self) -> dict[int, StreamColumns]:
        return {}

    def columns(self, batch: int) -> StreamColumns:
        """Return the step on one device at a batch, made once."""
        made = self._columns
        if batch not in made:
            stream, other = self.at(batch), next(iter(made.values()), None)
            made[batch] = other.at(stream) if other else StreamColumns(stream, self.layout)
        return made[batch]

    @cached_property
    def samples_per_s_of_host(self) -> float:
        """Samples a second that the loaders of one host make at most; infinite where unknown."""
        profile = self.profile
        if profile is None:
            return math.inf
        pipeline = profile.pipeline
        if pipeline is not None and pipeline.cpu_ms > 0:
            cores = pipeline.usable_cores * max(1, len(profile.ranks))
            return cores / (pipeline.cpu_ms / 1e3)
        if profile.lost_to_data > 0.05:
            return profile.samples_per_s
        return math.inf


def specs_for(cluster: Cluster, training: Training) -> list[ParallelSpec]:
    """Return the ways to use all ranks of a cluster that could be exact."""
    ranks, layout = cluster.ranks, training.layout
    splits = training.splits_layers and layout.prefix is not None
    found: list[ParallelSpec] = []
    for pp in divisors(ranks) if splits else (1,):
        for tp in divisors(ranks // pp) if splits else (1,):
            dp = ranks // (pp * tp)
            if pp <= layout.blocks and tp <= cluster.gpus:
                found += _data_parallel(cluster, pp, tp, dp)
    return found


def _data_parallel(cluster: Cluster, pp: int, tp: int, dp: int) -> Iterator[ParallelSpec]:
    yield ParallelSpec(pp=pp, tp=tp, dp_replicate=dp)
    if dp == 1:
        return
    for zero in (2, 3):
        if zero == 3 and pp > 1:
            continue  # every microbatch would gather the parameters again
        yield ParallelSpec(pp=pp, tp=tp, dp_shard=dp, zero=zero)
        shard = max(1, cluster.gpus // tp)
        if cluster.hosts > 1 and 1 < shard < dp and dp % shard == 0:
            yield ParallelSpec(pp=pp, tp=tp, dp_shard=shard, dp_replicate=dp // shard, zero=zero)


def divisors(count: int) -> tuple[int, ...]:
    """Return the divisors of a number, the smallest first.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(n for n in range(1, count + 1) if count % n == 0)


def plan_of(spec: ParallelSpec, cluster: Cluster, training: Training) -> ParallelPlan:
    """Return one way with its time and memory, or why it is rejected."""
    reason = _misfit(spec, training)
    if reason:
        return ParallelPlan(spec=spec, ranks=spec.world_size, fits=False, why=reason)
    samples = -(-training.batch // spec.dp)  # of the fullest rank
    microbatches, peak = _microbatches(spec, training, samples)
    memory = TaggedNumber(value=peak, source=NumberSource.SIMULATED)
    if peak > training.room_bytes:
        room = format_bytes(training.room_bytes)
        why = words("way.too_large", size=format_bytes(int(peak)), room=room)
        return ParallelPlan(
            spec=spec, ranks=spec.world_size, fits=False, why=why, peak_bytes=memory
        )
    columns = training.columns(-(-samples // microbatches))
    step = step_work(spec, cluster, training, columns, microbatches)
    cost = step_cost(step, training.costs)
    source = _surest(training.costs.source, cluster)
    return ParallelPlan(
        spec=replace(spec, microbatches=microbatches if microbatches > 1 else 0),
        ranks=spec.world_size,
        fits=True,
        why=_words(cost, spec, samples),
        step_ms=TaggedNumber(value=1e3 * cost.total_s, source=source),
        peak_bytes=memory,
        shares={
            name: TaggedNumber(value=value, source=source) for name, value in cost.shares.items()
        },
    )


def _surest(costs: NumberSource, cluster: Cluster) -> NumberSource:
    """Return how far the weakest number behind a time is known."""
    links = [cluster.inside] if cluster.ranks > 1 else []
    links += [cluster.between] if cluster.hosts > 1 else []
    order = list(NumberSource)
    return max([costs, *(link.source for link in links)], key=order.index)


def _misfit(spec: ParallelSpec, training: Training) -> str | None:
    """Return why a way is impossible for this model and batch; None where it is not.

    The ranks of a script may have a sample more or less than others, those of a Task may not.
    """
    batch = training.batch
    samples = batch // spec.dp
    undivided = [width for width in training.layout.widths if width % spec.tp]
    is_starved = spec.pp > 1 and microbatches_for(spec, max(1, samples)) > samples
    rules = (
        (batch < spec.dp, "no_sample"),
        (training.splits_layers and batch % spec.dp, "no_multiple"),
        (undivided, "undivided"),
        (is_starved, "starved"),
    )
    name = next((name for is_wrong, name in rules if is_wrong), None)
    if name is None:
        return None
    numbers = {
        "batch": batch,
        "parts": spec.dp,
        "tp": spec.tp,
        "width": min(undivided, default=0),
        "stages": spec.stages,
        "samples": samples,
    }
    return words(f"way.{name}", **{name: str(number) for name, number in numbers.items()})


def _microbatches(spec: ParallelSpec, training: Training, samples: int) -> tuple[int, float]:
    """Return the microbatches of a rank and the peak of the fullest one.

    A Task's batch is cut further until it fits; a script's is cut by its own loop alone.
    """
    count = microbatches_for(spec, samples)
    while True:
        columns = training.columns(-(-samples // count))
        # Under 1F1B the first stage holds one microbatch for each stage, the last one alone.
        peak = max(
            columns.peak_bytes(spec, stage, min(count, spec.pp - stage))
            for stage in {0, spec.pp - 1}
        )
        peak = training.reserved_ratio * peak + training.outside_bytes
        is_last = spec.pp > 1 or not training.splits_layers
        if peak <= training.room_bytes or is_last or 2 * count > min(samples, MOST_MICROBATCHES):
            return count, peak
        count *= 2


def step_work(
    spec: ParallelSpec,
    cluster: Cluster,
    training: Training,
    columns: StreamColumns,
    microbatches: int,
) -> StepWork:
    """Return what one step of a way consists of, from the step of one device at a microbatch."""
    layout = training.layout
    boundary = layout.boundary_bytes * columns.batch / training.batch
    tensor = cluster.link(1, spec.tp)
    hop = cluster.link(spec.tp * spec.dp, spec.pp)
    stages = []
    for number in range(spec.pp):
        blocks = sum(b * spec.pp // layout.blocks == number for b in range(layout.blocks))
        reduce_s = tensor.all_reduce_s(boundary, spec.tp)
        stages.append(
            replace(
                columns.work(spec, number),
                exchange_s=TENSOR_REDUCES * blocks * reduce_s,
                hop_s=2 * hop.send_s(boundary) if spec.pp > 1 else 0.0,
            )
        )
    hosts = -(-spec.world_size // cluster.gpus)
    share = columns.parameters / spec.dp_shard
    sizes = columns.gradients, columns.parameters
    # DDP exchanges in each backward; a script that spreads itself may wait for the last.
    waits = training.splits_layers or training.at(training.batch).spreads_itself
    exchanges = 1 if waits else training.micro_batches
    ranks = min(spec.world_size, cluster.gpus)
    on_host = offload_s(share, training.gpu.host_bandwidth, ranks) if spec.offload else 0.0
    return StepWork(
        stages=tuple(stages),
        microbatches=microbatches,
        gradients_s=exchanges * gradients_s(spec, cluster, layout, sizes),
        overlap=cluster.link(spec.tp, spec.dp).overlap,
        parameters=0.0 if spec.offload else columns.stepped_on(spec),
        host_s=on_host,
        data_s=training.step_samples / hosts / training.samples_per_s_of_host,
    )


def gradients_s(
    spec: ParallelSpec, cluster: Cluster, layout: Layout, sizes: tuple[float, float]
) -> float:
    """Return what the data-parallel ranks exchange in a step: gradients, and sharded parameters.

    DDP and ZeRO-1 reduce all gradients; ZeRO-2 scatters them and gathers the parameters once;
    ZeRO-3 gathers them twice. Of frozen parameters there are no gradients. `sizes`: bytes of the
    gradients and of the parameters, before any split.
    """
    if spec.dp == 1:
        return 0.0
    calls = max(1, layout.blocks // spec.pp) + 1
    held = (layout.share / (spec.tp * spec.pp) + (1 - layout.share)) / calls
    reduced, gathered = (held * size for size in sizes)
    if spec.zero < 2:
        return calls * cluster.link(spec.tp, spec.dp).all_reduce_s(reduced, spec.dp)
    sharing = cluster.link(spec.tp, spec.dp_shard)
    gathers = 2 if spec.zero == 3 else 1
    found = calls * sharing.all_gather_s(reduced, spec.dp_shard)  # a scatter takes as long
    found += gathers * calls * sharing.all_gather_s(gathered, spec.dp_shard)
    if spec.dp_replicate > 1:
        across = cluster.link(spec.tp * spec.dp_shard, spec.dp_replicate)
        found += calls * across.all_reduce_s(reduced / spec.dp_shard, spec.dp_replicate)
    return found


def _words(cost: StepCost, spec: ParallelSpec, samples: int) -> str:
    """Return where the time of a step goes."""
    parts = [
        (cost.compute_s - cost.tensor_s, "computing"),
        (cost.tensor_s, "inside_layers"),
        (cost.bubble_s, "bubble"),
        (cost.hop_s, "between_stages"),
        (cost.exposed_s, "exposed"),
        (cost.optimizer_s + cost.rest_s, "rest"),
        (cost.data_s - cost.busy_s, "waiting"),
    ]
    shown = tuple(
        words(f"way.{what}", time=format_ms(1e3 * s))
        for s, what in parts
        if s > 0.01 * cost.total_s
    )
    name = "way.of_a_rank" if spec.dp > 1 else "way.of_all"
    return words(name, n=str(samples), parts=shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found."""

    plans: Sequence[ParallelPlan]
    """On all ranks: the fastest that fits first, rejected ones last."""
    best: Mapping[int, ParallelPlan] = field(default_factory=dict)
    """By ranks: the fastest that fits, of one rank up to all."""


def search(cluster: Cluster, training: Training) -> Found:
    """List, reject and time the ways to use a cluster, and the best of smaller ones."""
    plans = plans_for(cluster, training)
    parts = {count: part_of(cluster, count) for count in smaller(cluster) if count < cluster.ranks}
    best = {count: plans_for(part, training)[0] for count, part in parts.items()}
    best[cluster.ranks] = plans[0]
    best = {count: plan for count, plan in best.items() if plan.fits}
    if not best and not training.splits_layers:  # a Task is not offloaded
        last = plan_of(spec_for(cluster.ranks, 3, offload=True), cluster, training)
        plans = sorted([*plans, last], key=_order)
        best = {cluster.ranks: last} if last.fits else {}
    return Found(plans=plans, best=best)


def plans_for(cluster: Cluster, training: Training) -> list[ParallelPlan]:
    """Return the ways to use all ranks: the fastest that fits first, rejected ones last."""
    plans = (plan_of(spec, cluster, training) for spec in specs_for(cluster, training))
    return sorted(plans, key=_order)


def _order(plan: ParallelPlan) -> tuple[bool, float, float]:
    """Sort what fits first, by its time; what is simpler goes first where the times are alike."""
    simple = plan.spec.zero + 10 * (plan.spec.tp > 1) + 20 * (plan.spec.pp > 1)
    time = round(plan.step_ms.value, 3) if plan.step_ms else math.inf
    return not plan.fits, time, simple


def smaller(cluster: Cluster) -> list[int]:
    """Return the numbers of ranks that are compared: parts of one host, then whole hosts."""
    counts = set(divisors(cluster.gpus))
    counts |= {cluster.gpus * hosts for hosts in divisors(cluster.hosts)}
    return sorted(counts)


def part_of(cluster: Cluster, ranks: int) -> Cluster:
    """Return a cluster of fewer ranks, or more, of the same kind."""
    if ranks <= cluster.gpus:
        return replace(cluster, gpus=ranks, hosts=1)
    return replace(cluster, hosts=-(-ranks // cluster.gpus))


def advise(found: Found, cluster: Cluster, training: Training) -> ParallelAdvice:
    """Return how many ranks are worth it, and why more are not."""
    asked = cluster.ranks
    if not found.best:
        return _advise_more(cluster, training)
    advice = partial(ParallelAdvice, asked=asked, batch=training.step_samples)
    fewest = min(found.best)
    fastest_s = {ranks: _step_ms(plan) for ranks, plan in found.best.items()}
    top = min(fastest_s, key=lambda ranks: fastest_s[ranks])
    enough = min(n for n, ms in fastest_s.items() if ms < LEAST_GAIN * fastest_s[top])
    plan = found.best[enough]
    gain = fastest_s[enough] / fastest_s.get(asked, math.inf)
    if plan.spec.offload:
        others = _advise_more(cluster, training).verdict
        verdict = words("way.offloaded", gpus=_gpus(asked), others=others)
        return advice(verdict=verdict, ranks=asked, spec=plan.spec)
    is_needed = enough == fewest > 1
    start = words("way.needed" if is_needed else "way.use", n=str(enough))
    cause = ""
    if enough == asked:
        verdict = start if is_needed else words("way.use_all", n=str(asked))
        if asked > fewest and not is_needed:
            ratio = f"{fastest_s[fewest] / fastest_s[asked]:.1f}"
            verdict = words("way.faster", use=verdict, ratio=ratio, fewer=_gpus(fewest))
    else:
        cause = cause_of(found, enough, cluster, training)
        stay = words("way.stay") if enough == 1 else start
        more = words("way.no_way", n=str(asked))
        if asked in fastest_s:
            more = words("way.gain", n=str(asked), ratio=f"{gain:.2f}")
        verdict = words("way.not_more", stay=stay, more=more, cause=cause)
    verdict = words("joint.end", text=verdict)
    return advice(verdict=verdict, ranks=enough, spec=plan.spec, cause=cause)


def _step_ms(plan: ParallelPlan) -> float:
    assert plan.step_ms is not None
    return plan.step_ms.value


def _gpus(count: int) -> str:
    return words("way.one_gpu") if count == 1 else words("way.gpus", n=str(count))


def _advise_more(cluster: Cluster, training: Training) -> ParallelAdvice:
    """Return how many ranks it takes where the asked ones do not suffice."""
    advice = partial(ParallelAdvice, asked=cluster.ranks, batch=training.step_samples)
    count = cluster.ranks
    while count < MOST_RANKS:
        count *= 2
        found = plans_for(part_of(cluster, count), training)[0]
        if found.fits:
            about = {"n": str(count), "fewer": _gpus(cluster.ranks), "way": found.spec.label}
            verdict = words("way.more_needed", **about)
            return advice(verdict=verdict, ranks=count, spec=found.spec)
        if not training.splits_layers and count > training.batch:
            break
    return advice(verdict=words("way.nothing_fits", gpus=_gpus(cluster.ranks)), ranks=None)


def cause_of(found: Found, enough: int, cluster: Cluster, training: Training) -> str:
    """Return why more ranks gain little: the largest part of their step that does not shrink."""
    plan = found.best.get(cluster.ranks)
    if plan is None:
        return found.plans[0].why
    shares = {name: one.value for name, one in plan.shares.items()}
    name = max(shares, key=shares.__getitem__)
    share = format_share(min(1.0, shares[name]))
    samples = training.batch // plan.spec.dp
    link = cluster.link(plan.spec.tp, plan.spec.dp)
    if name == "communication" and link.bytes_per_s < SLOW_BYTES_PER_S:
        name = "slow_link"
    elif name == "starts" and samples <= FEW_SAMPLES:
        name = "few_samples"
    return words(
        f"way.cause_{name}",
        share=share,
        rate=f"{training.samples_per_s_of_host:.0f}",
        bandwidth=f"{link.bytes_per_s / 1e9:.1f}",
        source=link.source.value,
        batch=str(training.batch),
        n=str(samples),
    )
