"""One look of `flatout watch`, as lines of text."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from flatout.records.live import LiveGpu, LiveHost, LiveJob, LiveTrainer, LiveView
from flatout.records.messages import ENGLISH, Messages, Text, messages, named, words
from flatout.records.units import (
    format_bytes,
    format_duration,
    format_ms,
    format_rate,
    format_share,
)
from flatout.reporting.blocks import Facts, label_cell, safe, terminal_lines
from flatout.reporting.profile.sentences import unseen
from flatout.reporting.tables import Column, table

LABELS = "watch.label_"
BAR_WIDTH = 20
MAX_RANKS = 8
"""Rows for training processes: one machine's devices."""
UNKNOWN = "n/a"


def render_watch(view: LiveView, *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the view: the job, the GPUs, the host, and what is missing."""
    say = messages(language)
    lines = [f"flatout watch  {view.at}"]
    if view.job is not None:
        lines += ["", *_job(view.job, say, width)]
    if view.gpus:
        lines += ["", *_gpus(view.gpus, say)]
    notes = (("note", note) for note in view.notes)
    rows: tuple[tuple[str, Text], ...] = (("host", tuple(_host(view.host))), *notes)
    lines += ["", *terminal_lines([Facts(rows=rows, labels=LABELS)], say, width)]
    return safe("\n".join(lines), say) + "\n"


def _job(job: LiveJob, say: Messages, width: int) -> list[str]:
    age = min((trainer.age_s for trainer in job.trainers), default=0.0)
    state = named("watch_state", job.state)
    if age > 5:
        state = words("watch.last_step", state=state, age=format_duration(age))
    took = format_duration(job.elapsed_s)
    about = {"workload": job.workload, "kind": job.kind, "time": took, "state": state}
    rows: list[tuple[str, Text]] = [("job", words("watch.job", **about)), ("folder", job.folder)]
    if not job.trainers:
        return terminal_lines([Facts(rows=tuple(rows), labels=LABELS)], say, width)
    first = job.trainers[0]
    rows.append(("speed", tuple(_speed(job, first))))
    lines = terminal_lines([Facts(rows=tuple(rows), labels=LABELS)], say, width)
    for name in ("data_wait", "busy"):
        shares = (t.busy_share if name == "busy" else t.shares.get(name) for t in job.trainers)
        if known := [share for share in shares if share is not None]:
            share = fmean(known)
            bar = "#" * round(min(1.0, share) * BAR_WIDTH)
            lines.append(f"{label_cell(name, say, LABELS)}  {format_share(share).rjust(5)}  {bar}")
    last = (("memory", _memory(job.trainers)), ("loss", _loss(first)))
    lines += terminal_lines([Facts(rows=last, labels=LABELS)], say, width)
    return [*lines, *(_ranks(job.trainers, say) if len(job.trainers) > 1 else [])]


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


def _ranks(trainers: Sequence[LiveTrainer], say: Messages) -> list[str]:
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
    titles = ("rank", "step", "step_time", "samples", "data_wait")
    columns = [Column(say(f"watch.column_{title}"), is_number=True) for title in titles]
    return ["", *table(columns, rows)]


def _gpus(gpus: Sequence[LiveGpu], say: Messages) -> list[str]:
    titles = ("util", "sm", "tensor", "memory", "power", "clock", "temperature", "others")
    columns = [Column(say(f"watch.column_{title}"), is_number=True) for title in titles]
    columns.insert(0, Column("GPU"))
    lines = table(columns, [_gpu(gpu) for gpu in gpus])
    reasons = dict.fromkeys(
        reason
        for gpu in gpus
        for name, reason in gpu.readings.missing.items()
        if name in ("all", "util_share", "sm_active_share")
    )
    return lines + [f"{UNKNOWN}: {say.text(reason)}" for reason in list(reasons)[:2]]


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
