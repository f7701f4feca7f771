"""One look of `flatout watch`, as lines of text."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from flatout.records.live import LiveGpu, LiveHost, LiveJob, LiveTrainer, LiveView
from flatout.records.messages import ENGLISH, Text, messages, named, words
from flatout.records.units import (
    format_bytes,
    format_duration,
    format_ms,
    format_rate,
    format_share,
)
from flatout.reporting.blocks import Block, Facts, Table, report
from flatout.reporting.profile.sentences import unseen

LABELS = "watch.label_"
BAR_WIDTH = 20
MAX_RANKS = 8
"""Rows for training processes: one machine's devices."""
UNKNOWN = "n/a"
GPU_COLUMNS = (
    *("gpu", "gpu_util", "sm", "tensor", "memory"),
    *("power", "clock", "temperature", "others"),
)


def render_watch(view: LiveView, *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the view: the job, the GPUs, the host, and what is missing."""
    return report(_blocks(view), messages(language), width)


def _blocks(view: LiveView) -> Iterator[Block]:
    yield f"flatout watch  {view.at}"
    if view.job is not None:
        yield Facts(rows=tuple(_job(view.job)), labels=LABELS)
        if len(view.job.trainers) > 1:
            yield _ranks(view.job.trainers)
    yield Table(columns=GPU_COLUMNS, rows=tuple(map(_gpu, view.gpus)))
    reasons = dict.fromkeys(
        reason
        for gpu in view.gpus
        for name, reason in gpu.readings.missing.items()
        if name in ("all", "util_share", "sm_active_share")
    )
    rows = [("unknown", reason) for reason in list(reasons)[:2]]
    notes = [("note", note) for note in view.notes]
    yield Facts(rows=(*rows, ("host", tuple(_host(view.host))), *notes), labels=LABELS)


def _job(job: LiveJob) -> Iterator[tuple[str, Text]]:
    age = min((trainer.age_s for trainer in job.trainers), default=0.0)
    state = named("watch_state", job.state)
    if age > 5:
        state = words("watch.last_step", state=state, age=format_duration(age))
    took = format_duration(job.elapsed_s)
    about = {"workload": job.workload, "kind": job.kind, "time": took, "state": state}
    yield "job", words("watch.job", **about)
    yield "folder", job.folder
    if not job.trainers:
        return
    first = job.trainers[0]
    yield "speed", tuple(_speed(job, first))
    for name in ("data_wait", "busy"):
        shares = (t.busy_share if name == "busy" else t.shares.get(name) for t in job.trainers)
        if known := [share for share in shares if share is not None]:
            share = fmean(known)
            bar = "#" * round(min(1.0, share) * BAR_WIDTH)
            yield name, f"{format_share(share):7}{bar}"
    yield "memory", _memory(job.trainers)
    yield "loss", _loss(first)


def _speed(job: LiveJob, first: LiveTrainer) -> Iterator[Text]:
    yield words("watch.step", n=str(first.step))
    if first.step_ms is not None:
        yield words("watch.step_time", time=format_ms(first.step_ms))
    rate = job.samples_per_s
    if rate is None:
        yield words("watch.no_rate")
    else:
        yield words("unit.samples_per_s", value=format_rate(rate))


def _memory(trainers: Sequence[LiveTrainer]) -> str:
    known = [t.memory_bytes for t in trainers if t.memory_bytes is not None]
    if not known:
        return UNKNOWN
    kind = "resident" if trainers[0].device_kind == "cpu" else "tensors"
    most = "_at_most" if len(known) > 1 else ""
    return words(f"watch.{kind}{most}", size=format_bytes(max(known)))


def _loss(trainer: LiveTrainer) -> str:
    if trainer.loss is None:
        why = trainer.missing.get("loss") or words("watch.not_seen")
        return words("joint.because", one=UNKNOWN, other=why)
    loss = f"{trainer.loss:.4g}" if math.isfinite(trainer.loss) else words("watch.not_finite")
    return words("watch.loss", loss=loss, n=str(trainer.loss_step))


def _ranks(trainers: Sequence[LiveTrainer]) -> Table:
    rows = (
        (
            str(trainer.rank),
            str(trainer.step),
            _or_unknown(trainer.step_ms, format_ms),
            _or_unknown(trainer.samples_per_s, format_rate),
            _or_unknown(trainer.shares.get("data_wait"), format_share),
        )
        for trainer in trainers[:MAX_RANKS]
    )
    return Table(columns=("rank", "step", "step_ms", "speed", "data_wait"), rows=tuple(rows))


def _gpu(gpu: LiveGpu) -> tuple[str, ...]:
    now = gpu.readings
    return (
        f"{gpu.index} {gpu.name}{' *' if gpu.is_of_job else ''}",
        _or_unknown(now.util_share, format_share),
        _or_unknown(now.sm_active_share, format_share),
        _or_unknown(now.tensor_active_share, format_share),
        _or_unknown(now.memory_used_bytes, format_bytes),
        _or_unknown(now.power_w, lambda watts: f"{watts:.0f} W"),
        _or_unknown(now.clock_mhz, lambda mhz: f"{mhz:.0f} MHz"),
        _or_unknown(now.temperature_c, lambda degrees: f"{degrees:.0f} C"),
        str(now.other_processes),
    )


def _host(host: LiveHost) -> Iterator[Text]:
    share = _or_unknown(host.cpu_share, format_share)
    yield words("watch.cores", n=str(host.cores), share=share)
    if host.memory_used_bytes is not None and host.memory_total_bytes is not None:
        used, total = format_bytes(host.memory_used_bytes), format_bytes(host.memory_total_bytes)
        yield words("watch.memory", used=used, total=total)
    if host.disk_read_bytes_per_s is not None and host.disk_write_bytes_per_s is not None:
        yield words("watch.disk_read", rate=format_bytes(host.disk_read_bytes_per_s))
        yield words("watch.disk_write", rate=format_bytes(host.disk_write_bytes_per_s))
    for name, reason in host.missing.items():
        yield words("watch.unknown", name=unseen(name), why=reason)


def _or_unknown(value: float | None, render: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else render(value)
