"""One look of `flatout watch`, as lines of text."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from flatout.records.live import LiveGpu, LiveHost, LiveJob, LiveTrainer, LiveView
from flatout.records.units import (
    format_bytes,
    format_duration,
    format_ms,
    format_rate,
    format_share,
)
from flatout.reporting.tables import Column, ascii_only, labelled, table

LABEL_WIDTH = 9
BAR_WIDTH = 20
MAX_RANKS = 8
"""Rows for training processes: one machine's devices."""
UNKNOWN = "n/a"


def render_watch(view: LiveView, *, width: int = 80) -> str:
    """Return the view: the job, the GPUs, the host, and what is missing."""
    lines = [f"flatout watch  {view.at}"]
    if view.job is not None:
        lines += ["", *_job(view.job, width)]
    if view.gpus:
        lines += ["", *_gpus(view.gpus)]
    lines += ["", *_labelled("host", ", ".join(_host(view.host)), width)]
    for note in view.notes:
        lines += _labelled("note", note, width)
    return ascii_only("\n".join(lines)) + "\n"


def _job(job: LiveJob, width: int) -> Iterator[str]:
    age = min((trainer.age_s for trainer in job.trainers), default=0.0)
    state = f"{job.state}, last step {format_duration(age)} ago" if age > 5 else job.state
    what = f"{job.workload} ({job.kind}, {format_duration(job.elapsed_s)}): {state}"
    yield from _labelled("job", what, width)
    yield from _labelled("folder", job.folder, width)
    if not job.trainers:
        return
    first = job.trainers[0]
    yield from _labelled("speed", ", ".join(_speed(job, first)), width)
    for label, name in (("data wait", "data_wait"), ("busy", "busy")):
        shares = [share for t in job.trainers if (share := _share(t, name)) is not None]
        if shares:
            yield _bar(label, fmean(shares))
    yield from _labelled("memory", _memory(job.trainers), width)
    yield from _labelled("loss", _loss(first), width)
    if len(job.trainers) > 1:
        yield from _ranks(job.trainers)


def _speed(job: LiveJob, first: LiveTrainer) -> Iterator[str]:
    yield f"step {first.step}"
    if first.step_ms is not None:
        yield f"{format_ms(first.step_ms)} a step"
    rate = job.samples_per_s
    yield f"{format_rate(rate)} samples/s" if rate is not None else "samples/s not known"


def _share(trainer: LiveTrainer, name: str) -> float | None:
    return trainer.busy_share if name == "busy" else trainer.shares.get(name)


def _bar(label: str, share: float) -> str:
    filled = "#" * round(min(1.0, share) * BAR_WIDTH)
    return f"{label.ljust(LABEL_WIDTH)}  {format_share(share).rjust(5)}  {filled}"


def _memory(trainers: Sequence[LiveTrainer]) -> str:
    known = [t.memory_bytes for t in trainers if t.memory_bytes is not None]
    if not known:
        return UNKNOWN
    kind = "resident" if trainers[0].device_kind == "cpu" else "held by tensors"
    return f"{format_bytes(max(known))} {kind}" + (" at most" if len(known) > 1 else "")


def _loss(trainer: LiveTrainer) -> str:
    if trainer.loss is None:
        return f"{UNKNOWN}: {trainer.missing.get('loss', 'not seen yet')}"
    loss = f"{trainer.loss:.4g}" if math.isfinite(trainer.loss) else "not finite"
    return f"{loss} (of one backward, step {trainer.loss_step})"


def _ranks(trainers: Sequence[LiveTrainer]) -> list[str]:
    rows = [
        [
            str(trainer.rank),
            str(trainer.step),
            _or_unknown(trainer.step_ms, format_ms),
            _or_unknown(trainer.samples_per_s, format_rate),
            _or_unknown(trainer.shares.get("data_wait"), format_share),
        ]
        for trainer in trainers[:MAX_RANKS]
    ]
    titles = ("rank", "step", "step time", "samples/s", "data wait")
    return ["", *table([Column(title, is_number=True) for title in titles], rows)]


def _gpus(gpus: Sequence[LiveGpu]) -> list[str]:
    titles = ("GPU-Util", "SM", "tensor", "memory", "power", "clock", "temp", "others")
    columns = [Column("GPU"), *(Column(title, is_number=True) for title in titles)]
    lines = table(columns, [_gpu(gpu) for gpu in gpus])
    reasons = dict.fromkeys(
        reason
        for gpu in gpus
        for name, reason in gpu.readings.missing.items()
        if name in ("all", "util_share", "sm_active_share")
    )
    return lines + [f"{UNKNOWN}: {reason}" for reason in list(reasons)[:2]]


def _gpu(gpu: LiveGpu) -> list[str]:
    now = gpu.readings
    return [
        f"{gpu.index} {gpu.name}{' *' if gpu.is_of_job else ''}",
        _or_unknown(now.util_share, format_share),
        _or_unknown(now.sm_active_share, format_share),
        _or_unknown(now.tensor_active_share, format_share),
        _or_unknown(now.memory_used_bytes, format_bytes),
        _or_unknown(now.power_w, lambda watts: f"{watts:.0f} W"),
        _or_unknown(now.clock_mhz, lambda mhz: f"{mhz:.0f} MHz"),
        _or_unknown(now.temperature_c, lambda degrees: f"{degrees:.0f} C"),
        str(now.other_processes),
    ]


def _host(host: LiveHost) -> Iterator[str]:
    yield f"{host.cores} cores {_or_unknown(host.cpu_share, format_share)} busy"
    if host.memory_used_bytes is not None and host.memory_total_bytes is not None:
        used, total = format_bytes(host.memory_used_bytes), format_bytes(host.memory_total_bytes)
        yield f"memory {used} of {total}"
    if host.disk_read_bytes_per_s is not None and host.disk_write_bytes_per_s is not None:
        yield f"disk read {format_bytes(host.disk_read_bytes_per_s)}/s"
        yield f"write {format_bytes(host.disk_write_bytes_per_s)}/s"
    for name, reason in host.missing.items():
        yield f"{name} {UNKNOWN}: {reason}"


def _or_unknown(value: float | None, render: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else render(value)


def _labelled(label: str, text: str, width: int) -> list[str]:
    return labelled(label.ljust(LABEL_WIDTH), text, width)
