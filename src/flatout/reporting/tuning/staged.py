"""The staged table of a tuning: one row a technique, as the recipe grows."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from flatout.records.ablation import Ablation, StagedRow, misleading
from flatout.records.messages import Sentence, Text, words
from flatout.records.units import (
    format_bytes,
    format_duration,
    format_rate,
    format_ratio,
    format_share,
)
from flatout.reporting.blocks import UNKNOWN, Section, Table, known_columns
from flatout.reporting.tables import NOTHING

MILLION = 1e6
SECONDS_A_DAY = 86_400.0
FEW = 10.0
"""Below so many, minutes and attempts are given with a decimal."""
ARTICLE = {"low": "35 %", "high": "95 %", "slow": "120", "fast": "50", "ratio": "2.40x"}
"""Utilisation and minutes of the article that the demo is measured against."""
APART = 1.05
"""Single runs that differ by less say nothing of which is faster."""
MARKS = {"run": "staged.one_run", "screen": "staged.screened"}


def staged_section(ablation: Ablation, *, with_article: bool = False) -> Section | None:
    """Return the table with its sentences; None where no recipe was proven."""
    stages = ablation.stages
    if len(stages) < 2:
        return None
    rows = tuple(_row(ablation, stage) for stage in stages)
    table = known_columns(Table(columns=columns_of(ablation), rows=rows))
    said = _sentences(ablation, with_article=with_article)
    return Section(name="stages", blocks=(table, *said))


def columns_of(ablation: Ablation) -> tuple[str, ...]:
    """Return the names of the columns: what a utilisation is depends on the device."""
    busy = "cpu_busy" if ablation.baseline.gpu_util_share is None else "gpu_util"
    if ablation.baseline.device_kind != "cpu" and busy == "cpu_busy":
        busy = "device_busy"
    minutes = "minutes" if ablation.training else "minutes_per_million"
    last = ("attempts", "peak_memory", "alone", "promise")
    return ("stage", busy, "samples_per_s", minutes, *last)


def _row(ablation: Ablation, stage: StagedRow) -> tuple[Text, ...]:
    whole_s = training_s(ablation, stage)
    rate: Text = UNKNOWN
    if stage.samples_per_s:
        rate = format_rate(stage.samples_per_s)
        if stage.source == "run":
            rate = words("staged.one_run", value=rate)
    alone: Text = UNKNOWN if stage.technique else NOTHING
    if stage.alone is not None:
        alone = format_ratio(stage.alone)
        if stage.alone_source in MARKS:
            alone = words(MARKS[stage.alone_source], value=alone)
    return (
        stage.technique.split()[0] if stage.technique else words("tuning.baseline"),
        UNKNOWN if stage.utilisation is None else format_share(stage.utilisation),
        rate,
        UNKNOWN if whole_s is None else count(whole_s / 60),
        count(SECONDS_A_DAY / whole_s) if whole_s and ablation.training else UNKNOWN,
        UNKNOWN if stage.peak_bytes is None else format_bytes(stage.peak_bytes),
        alone,
        stage.promise or NOTHING,
    )


def training_s(ablation: Ablation, stage: StagedRow) -> float | None:
    """Return the seconds of the whole training, or of a million samples; without evaluations."""
    if not stage.samples_per_s:
        return None
    training, baseline = ablation.training, ablation.baseline
    samples = training.steps * baseline.samples_per_step if training else MILLION
    seconds = samples / stage.samples_per_s
    if baseline.rare and baseline.samples_per_step:
        # No technique makes less of it. The report says that saving is not in the time.
        rare_ms = baseline.rare.ms_per_step * max(0.0, 1 - baseline.rare.saving_share)
        seconds += samples / baseline.samples_per_step * rare_ms / 1e3
    return seconds


def count(value: float) -> str:
    """Return minutes or attempts, with a decimal where there are few."""
    return f"{value:.1f}" if value < FEW else f"{value:.0f}"


def only_on_top(stages: Sequence[StagedRow]) -> list[str]:
    """Return the techniques that are slower alone and faster on top of those before them.

    >>> workers = StagedRow(technique="loader_workers", alone=1.0, samples_per_s=80.0)
    >>> threads = StagedRow(technique="cpu_threads threads=1", alone=0.8, samples_per_s=104.0)
    >>> only_on_top([StagedRow(samples_per_s=80.0), workers, threads])
    ['cpu_threads']
    """
    return [
        stage.technique.split()[0]
        for before, stage in pairwise(stages)
        if stage.alone is not None
        and stage.alone <= 1 / APART
        and (stage.samples_per_s or 0.0) >= APART * (before.samples_per_s or math.inf)
    ]


def _sentences(ablation: Ablation, *, with_article: bool) -> Iterator[Sentence]:
    stages, training = ablation.stages, ablation.training
    first, last = stages[0], stages[-1]
    before_s, after_s = training_s(ablation, first), training_s(ablation, last)
    if before_s and after_s and training:
        before, after = format_duration(before_s), format_duration(after_s)
        about = {"steps": f"{training.steps:.0f}", "source": training.source}
        yield words("staged.training", before=before, after=after, **about)
    slow = misleading(stages)
    if slow is not None:
        yield words("staged.busy_is_not_speed", technique=slow.technique.split()[0])
    for technique in only_on_top(stages):
        yield words("staged.only_on_top", technique=technique)
    if with_article and before_s and after_s:
        yield words(
            "staged.article",
            own_low=format_share(first.utilisation or 0.0),
            own_high=format_share(last.utilisation or 0.0),
            own_ratio=format_ratio(before_s / after_s),
            **ARTICLE,
        )
    marks: list[Text] = []
    if any("run" in (stage.source, stage.alone_source) for stage in stages):
        marks.append(words("staged.what_one_run_is"))
    if any(stage.alone_source == "screen" for stage in stages):
        marks.append(words("staged.what_screened_is"))
    if marks:
        yield words("staged.marks", marks=tuple(marks))
