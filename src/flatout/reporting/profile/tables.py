"""The input pipeline's diagnosis as a table in the reader's language.

A profile as tables, in the reader's language: what Markdown and HTML share.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from flatout.records.catalogue import declared
from flatout.records.journey import TRAINING, WORKERS, Leg, Stage, WorkerFacts
from flatout.records.memory import TensorAtPeak
from flatout.records.profile import PHASES, Profile
from flatout.records.readings import GpuReadings, Limits
from flatout.records.units import (
    format_bytes,
    format_count,
    format_ms,
    format_rate,
    format_share,
    with_prefix,
)
from flatout.reporting.messages import Messages
from flatout.reporting.profile.sentences import add_up, cell, known_ceilings, share_cells, times

MOST_MODULES = 8
"""Modules shown: what lies below the eighth is hardly what fills a device."""
DATA_LEGS = ("read", "decode", "collate", "queue", "pin", "sampler")
COLOURS = {phase: phase for phase in PHASES} | dict.fromkeys(DATA_LEGS, "data_wait")
"""The phase whose colour a leg has; legs that are not here belong to the rest of the step."""
MOST_ENTRIES = 10
"""Kernels or operators shown: the rest is for a trace viewer."""
WORD_COLUMNS = frozenset(
    {
        "kernel",
        "operator",
        "phase",
        "leg",
        "techniques",
        "cause",
        "reading",
        "made_in",
        "line",
        "module",
        "what",
        "worker",
        "shape",
    }
)
"""Columns that hold words; the others hold numbers, which stand at the right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One table with what has to be said about it."""

    name: str
    """Of its title, among the messages `section.*`."""
    columns: tuple[str, ...]
    """Names of the titles, among the messages `column.*`."""
    rows: tuple[tuple[str, ...], ...]
    shares: tuple[float, ...] = ()
    """Of each row the length of its bar, in [0, 1]; empty where bars would say nothing."""
    kinds: tuple[str, ...] = ()
    """Of each row the phase whose colour it has; empty where it has none."""
    sentences: tuple[str, ...] = ()


def sheets(profile: Profile, say: Messages) -> tuple[Sheet, ...]:
    """Return every table for which there is data, in the order of a report."""
    makers: tuple[Callable[[Profile, Messages], Iterator[Sheet]], ...] = (
        _ceilings,
        _limits,
        _journey,
        pipeline_sheets,
        _memory,
        _gpu,
        _syncs,
        _ranks,
        _trace,
    )
    return tuple(
        _trimmed(sheet, say) for make in makers for sheet in make(profile, say) if sheet.rows
    )


def phases(profile: Profile, say: Messages) -> Sheet:
    """Return the phases of a step; both columns add up to their last row as they are printed."""
    spent = add_up([profile.phases_ms[phase] for phase in PHASES], 0.01)
    shares = add_up([100 * profile.share(phase) for phase in PHASES], 0.1)
    rows = [
        (say(f"phase.{phase}"), cell(ms, profile.phases_ms[phase], 2), share)
        for phase, ms, share in zip(PHASES, spent, share_cells(profile, shares), strict=True)
    ]
    rows.append((say("phase.step"), f"{sum(spent):.2f}", f"{sum(shares):.1f} %"))
    return Sheet(
        name="step",
        columns=("phase", "ms", "share"),
        rows=tuple(rows),
        shares=(*(profile.share(phase) for phase in PHASES), 0.0),
        kinds=(*PHASES, ""),
    )


def _ceilings(profile: Profile, say: Messages) -> Iterator[Sheet]:
    ceilings, step_ms = profile.ceilings, profile.step_ms.median
    causes = (("nothing", 1.0), *known_ceilings(profile))
    told = "ceilings_measured" if ceilings.is_measured else "ceilings_derived"
    yield Sheet(
        name="ceilings",
        columns=("cause", "ratio", "step_time"),
        rows=tuple(
            (say(f"cause.{name}"), times(ratio, say), format_ms(step_ms / ratio))
            for name, ratio in causes
        ),
        shares=tuple(min(1.0, 1.0 / ratio) for _name, ratio in causes),
        sentences=(say(f"about.{told}"),),
    )


def _limits(profile: Profile, say: Messages) -> Iterator[Sheet]:
    if profile.limits is not None:
        rows = tuple(_limit_rows(profile.limits, say))
        yield Sheet(name="limits", columns=("reading", "value"), rows=rows)


def _limit_rows(limits: Limits, say: Messages) -> Iterator[tuple[str, str]]:
    if limits.flops_per_step is not None:
        value, prefix = with_prefix(limits.flops_per_step)
        words = say("limit.flops_value", value=format_rate(value), prefix=prefix)
        yield say("limit.flops"), words
    if limits.gemm_flops_per_s is not None:
        value, prefix = with_prefix(limits.gemm_flops_per_s)
        words = say("limit.gemm_value", value=format_rate(value), prefix=prefix)
        yield say("limit.gemm", dtype=limits.gemm_dtype), words
    if limits.least_step_ms is not None:
        yield say("limit.least_step"), format_ms(limits.least_step_ms)
    for name, per_s in (
        ("memory", limits.memory_bytes_per_s),
        ("copy", limits.copy_bytes_per_s),
    ):
        if per_s is not None:
            yield say(f"limit.{name}"), _bandwidth(per_s, say)
    if limits.loader_samples_per_s is not None:
        rate = format_rate(limits.loader_samples_per_s)
        yield say("limit.loader"), say("unit.samples_per_s", value=rate)


def _journey(profile: Profile, say: Messages) -> Iterator[Sheet]:
    if profile.journey is None:
        return
    for where, about in ((TRAINING, "journey"), (WORKERS, "worker_legs")):
        legs = [leg for leg in profile.journey.legs if leg.where == where]
        yield Sheet(
            name="journey",
            columns=("leg", "ms_per_step", "share", "ms_per_sample", "bytes", "rate", "limit"),
            rows=tuple(_leg(leg, say) for leg in legs),
            shares=tuple(min(1.0, leg.share) for leg in legs),
            kinds=tuple(COLOURS.get(leg.name, "other") for leg in legs),
            sentences=(say(f"about.{about}"),),
        )
    workers = profile.journey.workers
    yield Sheet(
        name="workers",
        columns=(
            *("worker", "busy", "user", "system", "switches", "storage", "read", "memory"),
            "growth",
        ),
        rows=tuple(_worker(worker, say) for worker in workers),
        shares=tuple(min(1.0, worker.busy_share) for worker in workers),
    )


def _leg(leg: Leg, say: Messages) -> tuple[str, ...]:
    return (
        say.known("leg", leg.name),
        format_count(leg.ms, 2),
        format_share(leg.share),
        _known(leg.per_sample_ms, lambda ms: format_count(ms, 3), say),
        _known(leg.bytes_per_step, format_bytes, say),
        _known(leg.bytes_per_s, lambda per_s: _bandwidth(per_s, say), say),
        _known(leg.limit_bytes_per_s, lambda per_s: _bandwidth(per_s, say), say),
    )


def _worker(worker: WorkerFacts, say: Messages) -> tuple[str, ...]:
    is_training = worker.number < 0
    switches = worker.voluntary_switches_per_s + worker.involuntary_switches_per_s
    return (
        say("where.training") if is_training else say("where.worker", number=worker.number),
        format_share(worker.busy_share),
        format_share(worker.user_share),
        format_share(worker.system_share),
        format_rate(switches),
        _known(worker.storage_bytes_per_step, format_bytes, say),
        _known(worker.read_bytes_per_step, format_bytes, say),
        _known(worker.pss_bytes, format_bytes, say),
        _known(worker.growth_bytes_per_step, format_bytes, say),
    )


def _memory(profile: Profile, say: Messages) -> Iterator[Sheet]:
    story = profile.memory
    if story is None:
        return
    top = max(story.peak_bytes, 1)
    known = [phase for phase in PHASES if phase in story.by_phase]
    names = [*known, *(phase for phase in story.by_phase if phase not in PHASES)]
    yield Sheet(
        name="by_phase",
        columns=("phase", "peak"),
        rows=tuple((say.known("phase", p), format_bytes(story.by_phase[p])) for p in names),
        shares=tuple(min(1.0, story.by_phase[p] / top) for p in names),
        kinds=tuple(p if p in PHASES else "other" for p in names),
        sentences=tuple(_memory_sentences(profile, say)),
    )
    yield Sheet(
        name="largest",
        columns=("size", "shape", "line", "made_in", "module"),
        rows=tuple(
            (
                format_bytes(tensor.bytes),
                _shape(tensor) or say("reading.unknown"),
                tensor.line or say("reading.unknown"),
                say.known("phase", tensor.phase),
                tensor.module or say("reading.unknown"),
            )
            for tensor in story.largest
        ),
    )
    modules = list(story.by_module.items())[:MOST_MODULES]
    yield Sheet(
        name="by_module",
        columns=("module", "size"),
        rows=tuple((name or say("reading.unknown"), format_bytes(n)) for name, n in modules),
        shares=tuple(min(1.0, n / top) for _name, n in modules),
    )


def _shape(tensor: TensorAtPeak) -> str:
    dtype = tensor.dtype.removeprefix("torch.")
    return f"{' x '.join(map(str, tensor.shape))} {dtype}".strip()


def _memory_sentences(profile: Profile, say: Messages) -> Iterator[str]:
    story = profile.memory
    assert story is not None
    phase = say.known("phase", story.peak_phase)
    yield say("about.memory", size=format_bytes(story.peak_bytes), phase=phase)
    if story.leak_bytes_per_step > 0:
        yield say("about.leak", size=format_bytes(story.leak_bytes_per_step))
    if story.fragmentation_share is not None and story.reserved_bytes is not None:
        share, size = format_share(story.fragmentation_share), format_bytes(story.reserved_bytes)
        yield say("about.fragmentation", share=share, size=size)
    if story.allocation_retries:
        yield say("about.retries", n=story.allocation_retries)
    if story.snapshot:
        yield say("about.snapshot", path=story.snapshot)


def _gpu(profile: Profile, say: Messages) -> Iterator[Sheet]:
    gpu = profile.gpu
    if gpu is None:
        return
    told = [say("about.gpu")]
    if gpu.throttle:
        told.append(say("about.throttle", reasons=", ".join(gpu.throttle)))
    if gpu.other_processes:
        told.append(say("about.gpu_others", n=gpu.other_processes))
    rows = [*_gpu_shares(profile, gpu, say), *_gpu_amounts(gpu, say)]
    yield Sheet(name="gpu", columns=("reading", "value"), rows=tuple(rows), sentences=tuple(told))


def _gpu_shares(profile: Profile, gpu: GpuReadings, say: Messages) -> Iterator[tuple[str, str]]:
    shares = {
        "util": gpu.util_share,
        "busy": profile.device_busy_share,
        "sm": gpu.sm_active_share,
        "tensor": gpu.tensor_active_share,
        "mfu": profile.mfu,
    }
    for name, share in shares.items():
        if share is not None:
            yield say(f"gpu.{name}"), format_share(share)


def _gpu_amounts(gpu: GpuReadings, say: Messages) -> Iterator[tuple[str, str]]:
    amounts: tuple[tuple[str, float | None, float | None, Callable[[float], str]], ...] = (
        ("memory", gpu.memory_used_bytes, gpu.memory_total_bytes, format_bytes),
        ("power", gpu.power_w, gpu.power_limit_w, lambda w: say("gpu.watts", value=f"{w:.0f}")),
        ("clock", gpu.clock_mhz, gpu.max_clock_mhz, lambda f: say("gpu.mhz", value=f"{f:.0f}")),
        ("temperature", gpu.temperature_c, None, lambda t: say("gpu.celsius", value=f"{t:.0f}")),
    )
    for name, value, limit, write in amounts:
        if value is not None:
            text = write(value)
            if limit is not None:
                text = say("gpu.of", value=text, limit=write(limit))
            yield say(f"gpu.{name}"), text
    received, sent = gpu.pcie_rx_bytes_per_s, gpu.pcie_tx_bytes_per_s
    if received is not None and sent is not None:
        one, other = _bandwidth(received, say), _bandwidth(sent, say)
        yield say("gpu.pcie"), say("gpu.both", one=one, other=other)


def _syncs(profile: Profile, say: Messages) -> Iterator[Sheet]:
    yield Sheet(
        name="syncs",
        columns=("line", "what", "times", "cost"),
        rows=tuple(
            (sync.line, sync.what, f"{sync.per_step:g}", _known(sync.ms_per_step, format_ms, say))
            for sync in profile.syncs
        ),
        sentences=(say("about.syncs"),),
    )


def _ranks(profile: Profile, say: Messages) -> Iterator[Sheet]:
    behind = tuple(
        say("about.straggler", rank=rank.rank, because=say.translated(rank.because))
        for rank in profile.ranks
        if rank.is_straggler
    )
    yield Sheet(
        name="ranks",
        columns=("rank", "ms_per_step", "communication", "speed"),
        rows=tuple(
            (
                str(rank.rank),
                f"{rank.step_ms:.2f}",
                _known(rank.exposed_communication_ms, format_ms, say),
                format_rate(rank.samples_per_s),
            )
            for rank in profile.ranks
        ),
        sentences=(say("about.ranks"), *behind),
    )


def _trace(profile: Profile, say: Messages) -> Iterator[Sheet]:
    trace = profile.trace
    if trace is None:
        return
    entries = (trace.kernels or trace.operators)[:MOST_ENTRIES]
    told = [say("about.trace", n=trace.steps, time=format_ms(trace.step_ms))]
    if trace.idle is not None:
        told.append(
            say(
                "about.idle",
                idle=format_share(trace.idle.idle_share),
                host=format_share(trace.idle.host_wait_share),
                kernel=format_share(trace.idle.kernel_wait_share),
                other=format_share(trace.idle.other_share),
            )
        )
    if trace.path:
        told.append(say("about.trace_file", path=trace.path, size=format_bytes(trace.file_bytes)))
    yield Sheet(
        name="trace",
        columns=("kernel" if trace.kernels else "operator", "times", "ms_per_step", "share"),
        rows=tuple(
            (entry.name, f"{entry.calls_per_step:g}", format_count(entry.ms_per_step, 3), share)
            for entry in entries
            for share in [format_share(entry.share)]
        ),
        shares=tuple(min(1.0, entry.share) for entry in entries),
        sentences=tuple(told),
    )


def _trimmed(sheet: Sheet, say: Messages) -> Sheet:
    """Return the table without the columns in which nothing is known."""
    unknown = say("reading.unknown")
    kept = [
        place
        for place in range(len(sheet.columns))
        if place == 0 or any(row[place] != unknown for row in sheet.rows)
    ]
    return replace(
        sheet,
        columns=tuple(sheet.columns[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in sheet.rows),
    )


def _bandwidth(per_s: float, say: Messages) -> str:
    return say("limit.bandwidth", size=format_bytes(per_s))


def _known(value: float | None, write: Callable[[float], str], say: Messages) -> str:
    return say("reading.unknown") if value is None else write(value)


def pipeline_sheets(profile: Profile, say: Messages) -> Iterator[Sheet]:
    """Return the table of a sample's legs, where samples were looked at."""
    pipeline = profile.pipeline
    if pipeline is None:
        return
    fed = "about.pipeline_fed" if pipeline.is_fed else "about.pipeline_starved"
    told = say(
        "about.pipeline",
        needed=format_count(pipeline.cores_needed),
        rate=format_rate(pipeline.samples_per_s),
        n=pipeline.samples,
    )
    sentences = [told, say(fed, cores=f"{pipeline.usable_cores:.0f}")]
    for lever in declared("prepared_by"):
        if pipeline.legs_of(lever) and not pipeline.is_fed:
            packed = format_count(pipeline.cores_without(lever))
            sentences.append(say("about.pipeline_packed", cores=packed))
    yield Sheet(
        name="pipeline",
        columns=("leg", "cpu_ms", "share", "blocked_ms", "sample_bytes", "techniques"),
        rows=tuple(_row(stage, say) for stage in pipeline.stages),
        shares=tuple(stage.share for stage in pipeline.stages),
        kinds=("data_wait",) * len(pipeline.stages),
        sentences=tuple(sentences),
    )


def _row(stage: Stage, say: Messages) -> tuple[str, ...]:
    unknown = say("reading.unknown")
    return (
        say.known("stage", stage.name),
        f"{stage.cpu_ms:.3f}",
        format_share(stage.share),
        f"{stage.wait_ms:.3f}" if stage.wait_ms else unknown,
        format_bytes(stage.bytes) if stage.bytes is not None else unknown,
        ", ".join(stage.levers) or unknown,
    )
