"""The sections of the report on one profile, as blocks: what terminal, Markdown and HTML share."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from flatout.analysis.disturbance import slowdown
from flatout.records.catalogue import declared, only_on_request
from flatout.records.journey import TRAINING, WORKERS, Journey, Leg, Pipeline, Stage, WorkerFacts
from flatout.records.memory import MemoryStory, TensorAtPeak
from flatout.records.messages import Sentence, Text, named, times, words, written
from flatout.records.profile import PHASES, LoaderFacts, Profile
from flatout.records.readings import GpuReadings, Limits, RankFacts, TraceSummary
from flatout.records.units import (
    format_bytes,
    format_count,
    format_ms,
    format_rate,
    format_share,
    with_prefix,
)
from flatout.reporting.blocks import (
    UNKNOWN,
    Advice,
    Block,
    Facts,
    Next,
    Section,
    Table,
    known_columns,
)
from flatout.reporting.profile.sentences import (
    ceilings_sentence,
    headline,
    known_ceilings,
    left_out,
    readings,
    warnings,
)

START_METHODS = ("fork", "spawn", "forkserver")
MOST_MODULES = 8
"""Modules shown: what is below the eighth is hardly what fills a device."""
DATA_LEGS = ("read", "decode", "collate", "queue", "pin", "sampler")
COLOURS = {phase: phase for phase in PHASES} | dict.fromkeys(DATA_LEGS, "data_wait")
"""The phase whose colour a leg has; legs that are not here belong to the rest of the step."""
MOST_ENTRIES = 10
"""Kernels or operators shown: the rest is for a trace viewer."""
MOST_LINES = 3
"""Lines and techniques that are named in a sentence."""
HIDDEN_STEP_SHARE = 0.001
"""A least step below a thousandth of the step says only that the step is not about products."""
RANK_PHASES = ("data_wait", "forward", "backward", "optimizer")


def sections(profile: Profile, workload: str) -> tuple[Section, ...]:
    """Return the report: the answer, why, what to type next, then all that was measured."""
    where = words(
        "headline.where", workload=workload, device=profile.device_name, kind=profile.device_kind
    )
    found = tuple(Advice(finding=finding, workload=workload) for finding in profile.findings)
    numbers = (*readings(profile), ("ceilings", ceilings_sentence(profile)))
    notes = tuple(("", written(note)) for note in profile.notes)
    absent = tuple(("", text) for text in left_out(profile))
    all_sections = (
        Section(name="answer", blocks=(headline(profile), *warnings(profile), where)),
        Section(name="findings", blocks=found or (words("about.no_findings"),)),
        Section(name="next", blocks=(Next(command=f"flatout tune {workload}"),)),
        Section(name="numbers", blocks=(Facts(rows=numbers),)),
        Section(name="step", blocks=(phases(profile),)),
        *details(profile),
        Section(name="notes", blocks=(Facts(rows=notes),) if notes else ()),
        Section(name="left_out", blocks=(Facts(rows=absent),) if absent else ()),
    )
    return tuple(section for section in all_sections if section.blocks)


def details(profile: Profile) -> tuple[Section, ...]:
    """Return a section for everything that was looked at closer."""
    limits, journey, memory = profile.limits, profile.journey, profile.memory
    made: dict[str, Iterable[Block]] = {
        "ceilings": _ceilings(profile),
        "limits": _limits(profile, limits) if limits else (),
        "journey": _journey(journey, limits) if journey else (),
        "workers": _workers(profile, journey) if journey else (),
        "pipeline": _pipeline(profile.pipeline) if profile.pipeline else (),
        "by_phase": _by_phase(memory) if memory else (),
        "largest": [_largest(memory)] if memory else (),
        "by_module": [_by_module(memory)] if memory else (),
        "gpu": _gpu(profile, profile.gpu) if profile.gpu else (),
        "syncs": _syncs(profile) if profile.syncs else (),
        "ranks": _ranks(profile) if profile.ranks else (),
        "trace": _trace(profile.trace) if profile.trace else (),
    }
    found = ((name, tuple(_with_rows(blocks))) for name, blocks in made.items())
    return tuple(Section(name=name, blocks=blocks) for name, blocks in found if blocks)


def _with_rows(blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        if not isinstance(block, Table):
            yield block
        elif block.rows:
            yield known_columns(block)


def phases(profile: Profile) -> Table:
    """Return the phases of a step; both columns add up to their last row as they are printed."""
    total = profile.step_ms.median
    scale, unit = (1.0, "ms") if total >= 1 else (1e3, "us")
    if total >= 10_000:
        scale, unit = 1e-3, "s"
    decimals = max(0, 3 - math.ceil(math.log10(max(total * scale, 1.0)))) + 1
    ms = [profile.phases_ms[phase] for phase in PHASES]
    spent = add_up([value * scale for value in ms], 10.0**-decimals)
    shares = add_up([100 * profile.share(phase) for phase in PHASES], 0.1)
    rows: list[tuple[Text, ...]] = [
        (words(f"phase.{phase}"), cell(time, value, decimals), f"{cell(share, value, 1)} %")
        for phase, value, time, share in zip(PHASES, ms, spent, shares, strict=True)
    ]
    # On a CPU nothing is copied to a device: that row would say nothing.
    unused = "h2d" if profile.device_kind == "cpu" and not profile.phases_ms["h2d"] else ""
    kept = [i for i, phase in enumerate(PHASES) if phase != unused]
    whole = (words("phase.step"), f"{sum(spent):.{decimals}f}", f"{sum(shares):.1f} %")
    return Table(
        columns=("phase", unit, "share"),
        rows=(*(rows[i] for i in kept), whole),
        shares=(*(profile.share(PHASES[i]) for i in kept), 0.0),
        kinds=(*(PHASES[i] for i in kept), ""),
    )


def add_up(values: Sequence[float], unit: float) -> list[float]:
    """Round values to multiples of a unit so that their sum stays the rounded sum.

    >>> [round(x, 1) for x in add_up([33.34, 33.33, 33.33], 0.1)]
    [33.4, 33.3, 33.3]
    """
    counts = [math.floor(value / unit) for value in values]
    missing = round(sum(values) / unit) - sum(counts)
    by_remainder = sorted(range(len(values)), key=lambda i: counts[i] - values[i] / unit)
    for i in by_remainder[:missing]:
        counts[i] += 1
    return [count * unit for count in counts]


def cell(rounded: float, value: float, decimals: int) -> str:
    """Return a rounded number for a table; of a value that is more than zero it is not zero.

    >>> cell(0.0, 0.002, 2), cell(0.0, 0.0, 2), cell(1.25, 1.254, 2)
    ('<0.01', '0.00', '1.25')
    """
    is_hidden = value > 0 and rounded < 10.0**-decimals / 2
    return f"<{10.0**-decimals:.{decimals}f}" if is_hidden else f"{rounded:.{decimals}f}"


def _ceilings(profile: Profile) -> Iterator[Block]:
    ceilings, step_ms = profile.ceilings, profile.step_ms.median
    causes = (("nothing", 1.0), *known_ceilings(profile))
    yield words(f"about.ceilings_{'measured' if ceilings.is_measured else 'derived'}")
    yield Table(
        columns=("cause", "ratio", "step_time"),
        rows=tuple(
            (words(f"cause.{name}"), times(ratio), format_ms(step_ms / ratio))
            for name, ratio in causes
        ),
        shares=tuple(min(1.0, 1.0 / ratio) for _name, ratio in causes),
    )


def _limits(profile: Profile, limits: Limits) -> Iterator[Block]:
    rate = limits.loader_samples_per_s
    if rate and profile.samples_per_s:
        yield _loader_limit(profile, rate)
    if limits.least_step_ms is not None:
        yield _least_step(profile, limits)
    least_copy_ms = find_least_copy_ms(profile, limits)
    if least_copy_ms is not None:
        per_s = _bandwidth(limits.copy_bytes_per_s or 0.0)
        yield words("about.least_copy", time=format_ms(least_copy_ms), rate=per_s)
    yield Table(columns=("reading", "value"), rows=tuple(_limit_rows(limits)))


def _loader_limit(profile: Profile, rate: float) -> Sentence:
    """Hold what the loader makes alone against what the training takes."""
    taken = profile.samples_per_s_per_rank
    name = "about.loader_faster" if rate > taken else "about.loader_slower"
    return words(
        f"{name}_rank" if profile.ranks else name,
        rate=format_rate(rate),
        taken=format_rate(taken),
        ratio=times(rate / taken),
    )


def _least_step(profile: Profile, limits: Limits) -> Sentence:
    least_ms, step_ms = limits.least_step_ms or 0.0, profile.step_ms.median
    name = "about.least_step"
    if least_ms < HIDDEN_STEP_SHARE * step_ms:
        name = "about.least_step_small"
    if least_ms >= step_ms:
        name = "about.least_step_faster"
    return words(
        name,
        time=format_ms(least_ms),
        flops=_flops(limits.flops_per_step or 0.0, "flops"),
        peak=_flops(limits.gemm_flops_per_s or 0.0, "gemm"),
        dtype=limits.gemm_dtype,
        ratio=times(step_ms / least_ms) if least_ms else UNKNOWN,
    )


def find_least_copy_ms(profile: Profile, limits: Limits) -> float | None:
    """Return what copying a step's batches to the device takes at least; None where none is."""
    sizes = [loader.batch_bytes for loader in profile.training_loaders]
    if profile.device_kind == "cpu" or not limits.copy_bytes_per_s or not any(sizes):
        return None
    # The batches of a step are those of all loaders.
    return 1e3 * statistics.fmean(sizes) * profile.batches_per_step / limits.copy_bytes_per_s


def _limit_rows(limits: Limits) -> Iterator[tuple[Text, ...]]:
    if limits.flops_per_step is not None:
        yield words("limit.flops"), _flops(limits.flops_per_step, "flops")
    if limits.gemm_flops_per_s is not None:
        peak = _flops(limits.gemm_flops_per_s, "gemm")
        yield words("limit.gemm", dtype=limits.gemm_dtype), peak
    if limits.least_step_ms is not None:
        yield words("limit.least_step"), format_ms(limits.least_step_ms)
    for name, per_s in (("memory", limits.memory_bytes_per_s), ("copy", limits.copy_bytes_per_s)):
        if per_s is not None:
            yield words(f"limit.{name}"), _bandwidth(per_s)
    if limits.loader_samples_per_s is not None:
        rate = format_rate(limits.loader_samples_per_s)
        yield words("limit.loader"), words("unit.samples_per_s", value=rate)


def _flops(count: float, name: str) -> Sentence:
    value, prefix = with_prefix(count)
    return words(f"limit.{name}_value", value=format_rate(value), prefix=prefix)


def _journey(journey: Journey, limits: Limits | None) -> Iterator[Block]:
    for where, about in ((TRAINING, "journey"), (WORKERS, "worker_legs")):
        legs = [leg for leg in journey.legs if leg.where == where]
        if not legs:
            continue
        yield words(f"about.{about}")
        yield Table(
            columns=("leg", "ms_per_step", "share", "ms_per_sample", "bytes", "rate", "limit"),
            rows=tuple(_leg(leg, limits) for leg in legs),
            shares=tuple(min(1.0, leg.share) for leg in legs),
            kinds=tuple(COLOURS.get(leg.name, "other") for leg in legs),
        )


def _leg(leg: Leg, limits: Limits | None) -> tuple[Text, ...]:
    limit = leg.limit_bytes_per_s
    if limit is None and leg.name == "h2d" and limits is not None:
        limit = limits.copy_bytes_per_s
    return (
        named("leg", leg.name),
        format_count(leg.ms, 2),
        format_share(leg.share),
        _known(leg.per_sample_ms, lambda ms: format_count(ms, 3)),
        _known(leg.bytes_per_step, format_bytes),
        _known(leg.bytes_per_s, _bandwidth),
        _known(limit, _bandwidth),
    )


def _workers(profile: Profile, journey: Journey) -> Iterator[Block]:
    for loader in profile.training_loaders[:1]:
        if loader.start_method:
            yield from _started(loader)
    yield Table(
        columns=(
            *("worker", "busy", "user", "system", "switches", "storage", "read", "memory"),
            "growth",
        ),
        rows=tuple(_worker(worker) for worker in journey.workers),
        shares=tuple(min(1.0, worker.busy_share) for worker in journey.workers),
    )


def _started(loader: LoaderFacts) -> Iterator[Sentence]:
    """Say how the workers start, and what that risks; only fork takes over what is alive."""
    if loader.start_method in START_METHODS:
        yield words(f"about.started_{loader.start_method}")
    if loader.start_reason:
        yield words("about.start_reason", why=written(loader.start_reason))
    if loader.start_method == "fork" and loader.cuda_at_start:
        yield words("about.forked_cuda")
    if loader.start_method == "fork" and loader.threads_at_start:
        yield words("about.forked_threads", names=loader.threads_at_start)


def _worker(worker: WorkerFacts) -> tuple[Text, ...]:
    is_training = worker.number < 0
    switches = worker.voluntary_switches_per_s + worker.involuntary_switches_per_s
    return (
        words("where.training")
        if is_training
        else words("where.worker", number=str(worker.number)),
        format_share(worker.busy_share),
        format_share(worker.user_share),
        format_share(worker.system_share),
        format_rate(switches),
        _known(worker.storage_bytes_per_step, format_bytes),
        _known(worker.read_bytes_per_step, format_bytes),
        _known(worker.pss_bytes, format_bytes),
        _known(worker.growth_bytes_per_step, format_bytes),
    )


def _pipeline(pipeline: Pipeline) -> Iterator[Block]:
    """Yield what a sample costs by leg."""
    yield words(
        "about.pipeline",
        needed=format_count(pipeline.cores_needed),
        rate=format_rate(pipeline.samples_per_s),
        n=str(pipeline.samples),
    )
    fed = "about.pipeline_fed" if pipeline.is_fed else "about.pipeline_starved"
    yield words(fed, cores=f"{pipeline.usable_cores:.3g}")
    if not pipeline.is_fed:
        yield from _savings(pipeline)
    yield Table(
        columns=("leg", "cpu_ms", "share", "blocked_ms", "sample_bytes", "techniques"),
        rows=tuple(_stage(stage) for stage in pipeline.stages),
        shares=tuple(stage.share for stage in pipeline.stages),
        kinds=("data_wait",) * len(pipeline.stages),
    )


def _savings(pipeline: Pipeline) -> Iterator[Sentence]:
    """Say how many cores the techniques leave that save most, and what packing leaves."""
    names = {name for stage in pipeline.stages for name in stage.techniques}
    useful = sorted((pipeline.cores_without(name), name) for name in names - only_on_request())
    for cores, name in useful[:MOST_LINES]:
        legs = tuple(named("stage", leg) for leg in pipeline.legs_of(name))
        yield words("about.pipeline_without", technique=name, cores=format_count(cores), legs=legs)
    for name in declared("prepared_by"):
        if pipeline.legs_of(name):
            packed = format_count(pipeline.cores_without(name))
            yield words("about.pipeline_packed", cores=packed)


def _stage(stage: Stage) -> tuple[Text, ...]:
    return (
        named("stage", stage.name),
        f"{stage.cpu_ms:.3f}",
        format_share(stage.share),
        f"{stage.wait_ms:.3f}" if stage.wait_ms else UNKNOWN,
        _known(stage.bytes, format_bytes),
        stage.techniques or UNKNOWN,
    )


def _by_phase(story: MemoryStory) -> Iterator[Block]:
    top = max(story.peak_bytes, 1)
    known = [phase for phase in PHASES if phase in story.by_phase]
    names = [*known, *(phase for phase in story.by_phase if phase not in PHASES)]
    yield from _memory_sentences(story)
    yield Table(
        columns=("phase", "peak"),
        rows=tuple((named("phase", p), format_bytes(story.by_phase[p])) for p in names),
        shares=tuple(min(1.0, story.by_phase[p] / top) for p in names),
        kinds=tuple(p if p in PHASES else "other" for p in names),
    )


def _largest(story: MemoryStory) -> Table:
    """Return the tensors that fill memory at its peak; those that are alike share a row."""
    alike = Counter(map(_tensor, story.largest))
    return Table(
        columns=("size", "shape", "line", "made_in", "module"),
        rows=tuple(
            (
                format_bytes(size) if count == 1 else f"{count} x {format_bytes(size)}",
                shape or UNKNOWN,
                line or UNKNOWN,
                named("phase", phase),
                module or UNKNOWN,
            )
            for (size, shape, line, phase, module), count in alike.items()
        ),
    )


def _tensor(tensor: TensorAtPeak) -> tuple[int, str, str, str, Text]:
    dtype = tensor.dtype.removeprefix("torch.")
    shape = f"{' x '.join(map(str, tensor.shape))} {dtype}".strip()
    # What a parameter is for says more than where it was made.
    kind = named("tensor_kind", tensor.kind.replace(" ", "_"))
    place = tuple(name for name in (kind, tensor.module) if name)
    return tensor.bytes, shape, tensor.line, tensor.phase, place


def _by_module(story: MemoryStory) -> Table:
    modules = list(story.by_module.items())[:MOST_MODULES]
    top = max(story.peak_bytes, 1)
    return Table(
        columns=("module", "size"),
        rows=tuple((name or UNKNOWN, format_bytes(n)) for name, n in modules),
        shares=tuple(min(1.0, n / top) for _name, n in modules),
    )


def _memory_sentences(story: MemoryStory) -> Iterator[Sentence]:
    phase = named("phase", story.peak_phase)
    yield words("about.memory", size=format_bytes(story.peak_bytes), phase=phase)
    if story.leak_bytes_per_step >= 1:
        yield words("about.leak", size=format_bytes(story.leak_bytes_per_step))
        for line, count in list(story.leak_by_line.items())[:MOST_LINES]:
            if line:
                yield words("about.leak_line", size=format_bytes(count), line=line)
    if story.fragmentation_share is not None and story.reserved_bytes is not None:
        share, size = format_share(story.fragmentation_share), format_bytes(story.reserved_bytes)
        yield words("about.fragmentation", share=share, size=size)
    if story.allocation_retries:
        yield words("about.retries", n=str(story.allocation_retries))
    if story.snapshot:
        yield words("about.snapshot", path=story.snapshot)


def _gpu(profile: Profile, gpu: GpuReadings) -> Iterator[Block]:
    yield words("about.gpu")
    if gpu.throttle:
        reasons = []
        for name in gpu.throttle:
            share, said = gpu.throttle_shares.get(name), slowdown(name)
            if share is not None:
                said = words("gpu.reason", name=said, share=format_share(share))
            reasons.append(said)
        yield words("about.throttle", reasons=tuple(reasons))
    if gpu.other_processes:
        yield words("about.gpu_others", n=str(gpu.other_processes))
    yield Table(columns=("reading", "value"), rows=(*_gpu_shares(profile, gpu), *_gpu_amounts(gpu)))


def _gpu_shares(profile: Profile, gpu: GpuReadings) -> Iterator[tuple[Text, ...]]:
    shares = {
        "util": gpu.util_share,
        "busy": profile.device_busy_share,
        "sm": gpu.sm_active_share,
        "tensor": gpu.tensor_active_share,
        "mfu": profile.mfu,
    }
    for name, share in shares.items():
        if share is not None:
            yield words(f"gpu.{name}"), format_share(share)


def _gpu_amounts(gpu: GpuReadings) -> Iterator[tuple[Text, ...]]:
    amounts: tuple[tuple[str, float | None, float | None, Callable[[float], Text]], ...] = (
        ("memory", gpu.memory_used_bytes, gpu.memory_total_bytes, format_bytes),
        ("power", gpu.power_w, gpu.power_limit_w, lambda w: words("gpu.watts", value=f"{w:.0f}")),
        ("clock", gpu.clock_mhz, gpu.max_clock_mhz, lambda f: words("gpu.mhz", value=f"{f:.0f}")),
        ("temperature", gpu.temperature_c, None, lambda t: words("gpu.celsius", value=f"{t:.0f}")),
    )
    for name, value, limit, write in amounts:
        if value is not None:
            text = write(value)
            if limit is not None:
                text = words("gpu.of", value=text, limit=write(limit))
            yield words(f"gpu.{name}"), text
    received, sent = gpu.pcie_rx_bytes_per_s, gpu.pcie_tx_bytes_per_s
    if received is not None and sent is not None:
        one, other = _bandwidth(received), _bandwidth(sent)
        yield words("gpu.pcie"), words("gpu.both", one=one, other=other)


def _syncs(profile: Profile) -> Iterator[Block]:
    yield words("about.syncs_cpu" if profile.device_kind == "cpu" else "about.syncs")
    yield Table(
        columns=("line", "what", "times", "cost"),
        rows=tuple(
            (
                sync.line or UNKNOWN,
                sync.what,
                f"{sync.per_step:.3g}",
                _known(sync.ms_per_step, format_ms),
            )
            for sync in profile.syncs
        ),
    )


def _ranks(profile: Profile) -> Iterator[Block]:
    """Yield the ranks, those with most work of their own first, and who holds up the others."""
    ranks = sorted(profile.ranks, key=_own_ms, reverse=True)
    yield words("about.ranks")
    yield _spread(ranks)
    for rank in ranks:
        if rank.is_straggler:
            because = written(rank.because)
            yield words("about.straggler", rank=str(rank.rank), because=because)
    yield Table(
        columns=("rank", "ms_per_step", *RANK_PHASES, "communication", "speed"),
        rows=tuple(
            (
                str(rank.rank),
                f"{rank.step_ms:.2f}",
                *(format_count(rank.phases_ms[name]) for name in RANK_PHASES),
                _known(rank.exposed_communication_ms, format_count),
                format_rate(rank.samples_per_s),
            )
            for rank in ranks
        ),
    )


def _own_ms(rank: RankFacts) -> float:
    return rank.step_ms - (rank.exposed_communication_ms or 0.0)


def _spread(ranks: list[RankFacts]) -> Sentence:
    """Say how far the ranks are apart, and what they spend on waiting for each other."""
    n = str(len(ranks))
    if any(rank.exposed_communication_ms is None for rank in ranks):
        return words("about.ranks_unseen", n=n)
    shares = [(rank.exposed_communication_ms or 0.0) / (rank.step_ms or 1.0) for rank in ranks]
    return words(
        "about.ranks_spread",
        n=n,
        low=format_ms(_own_ms(ranks[-1])),
        high=format_ms(_own_ms(ranks[0])),
        share=format_share(statistics.median(shares)),
    )


def _trace(trace: TraceSummary) -> Iterator[Block]:
    entries = (trace.kernels or trace.operators)[:MOST_ENTRIES]
    yield words("about.trace", n=str(trace.steps), time=format_ms(trace.step_ms))
    if trace.idle is not None:
        yield words(
            "about.idle",
            idle=format_share(trace.idle.idle_share),
            host=format_share(trace.idle.host_wait_share),
            kernel=format_share(trace.idle.kernel_wait_share),
            other=format_share(trace.idle.other_share),
        )
    if trace.exposed_communication_ms:
        yield words("about.exposed", time=format_ms(trace.exposed_communication_ms))
    if trace.layout_conversion_share:
        yield words("about.layouts", share=format_share(trace.layout_conversion_share))
    if trace.tensor_core_share is not None:
        yield words("about.tensor_cores", share=format_share(trace.tensor_core_share))
    if trace.path:
        yield words("about.trace_file", path=trace.path, size=format_bytes(trace.file_bytes))
    yield Table(
        columns=("kernel" if trace.kernels else "operator", "times", "ms_per_step", "share"),
        rows=tuple(
            (
                entry.name,
                f"{entry.calls_per_step:g}",
                format_count(entry.ms_per_step, 3),
                format_share(entry.share),
            )
            for entry in entries
        ),
        shares=tuple(min(1.0, entry.share) for entry in entries),
    )


def _bandwidth(per_s: float) -> Sentence:
    return words("limit.bandwidth", size=format_bytes(per_s))


def _known(value: float | None, write: Callable[[float], Text]) -> Text:
    return UNKNOWN if value is None else write(value)
