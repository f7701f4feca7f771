"""The staged table of a tuning: one row a technique, as the recipe grows."""

from dataclasses import dataclass

from flatout.records.ablation import SECONDS_A_DAY, Ablation, StagedRow, misleading
from flatout.records.messages import Messages, Sentence, Text, words
from flatout.records.units import (
    format_bytes,
    format_duration,
    format_rate,
    format_ratio,
    format_share,
)
from flatout.reporting.blocks import UNKNOWN, Section, Table, known_columns, terminal_lines
from flatout.reporting.tables import NOTHING

MILLION = 1e6
FEW = 10.0
"""Below so many, minutes and attempts are given with a decimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Article:
    """The figures of the article that the demo is measured against."""

    utilisation: tuple[float, float] = (0.35, 0.95)
    minutes: tuple[float, float] = (120.0, 50.0)


def staged_section(ablation: Ablation, article: Article | None = None) -> Section | None:
    """Return the table with its sentences; None where no recipe was proven.

    The figures of an article, if given, are put next to those that were measured.
    """
    stages = ablation.stages
    if len(stages) < 2:
        return None
    table = Table(
        columns=columns_of(ablation),
        rows=tuple(_row(ablation, stage) for stage in stages),
    )
    return Section(
        name="stages",
        blocks=(known_columns(table), *_sentences(ablation, article)),
    )


def staged_lines(section: Section, say: Messages, width: int) -> list[str]:
    """Return the section on a terminal, without its title."""
    return [line for block in section.blocks for line in terminal_lines(block, say, width)]


def columns_of(ablation: Ablation) -> tuple[str, ...]:
    """Return the names of the columns: what a utilisation is depends on the device."""
    busy = "cpu_busy" if ablation.baseline.gpu_util_share is None else "gpu_util"
    if ablation.baseline.device_kind != "cpu" and busy == "cpu_busy":
        busy = "device_busy"
    minutes = "minutes" if ablation.training else "minutes_per_million"
    return (
        "stage",
        busy,
        "samples_per_s",
        minutes,
        "attempts",
        "peak_memory",
        "alone",
        "promise",
    )


def _row(ablation: Ablation, stage: StagedRow) -> tuple[Text, ...]:
    per_s = stage.samples_per_s
    whole_s = training_s(ablation, stage)
    attempts: Text = UNKNOWN
    if whole_s and ablation.training:
        attempts = count(SECONDS_A_DAY / whole_s)
    rate: Text = UNKNOWN
    if per_s:
        rate = format_rate(per_s)
        if stage.source == "run":
            rate = words("staged.one_run", value=rate)
    is_first = not stage.technique
    return (
        words("tuning.baseline") if is_first else stage.technique.split()[0],
        UNKNOWN if stage.utilisation is None else format_share(stage.utilisation),
        rate,
        UNKNOWN if whole_s is None else count(whole_s / 60),
        attempts,
        UNKNOWN if stage.peak_bytes is None else format_bytes(stage.peak_bytes),
        _alone(stage),
        stage.promise or NOTHING,
    )


def _alone(stage: StagedRow) -> Text:
    if stage.alone is None:
        return NOTHING if not stage.technique else UNKNOWN
    marks = {"run": "staged.one_run", "screen": "staged.screened"}
    ratio = format_ratio(stage.alone)
    return words(marks[stage.alone_source], value=ratio) if stage.alone_source in marks else ratio


def training_s(ablation: Ablation, stage: StagedRow) -> float | None:
    """Return the seconds of the whole training, or of a million samples; without evaluations."""
    if not stage.samples_per_s:
        return None
    training, baseline = ablation.training, ablation.baseline
    samples = training.samples(baseline) if training else MILLION
    seconds = samples / stage.samples_per_s
    if baseline.rare and baseline.samples_per_step:
        # No technique makes less of it. The report says that saving is not in the time.
        rare_ms = baseline.rare.ms_per_step * max(0.0, 1 - baseline.rare.saving_share)
        seconds += samples / baseline.samples_per_step * rare_ms / 1e3
    return seconds


def count(value: float) -> str:
    """Return minutes or attempts, with a decimal where there are few."""
    return f"{value:.1f}" if value < FEW else f"{value:.0f}"


def _sentences(ablation: Ablation, article: Article | None) -> tuple[Sentence, ...]:
    stages, found = ablation.stages, []
    first, last = stages[0], stages[-1]
    before_s, after_s = training_s(ablation, first), training_s(ablation, last)
    if before_s and after_s and ablation.training:
        length = ablation.training
        found.append(
            words(
                "staged.training",
                before=format_duration(before_s),
                after=format_duration(after_s),
                steps=f"{length.steps:.0f}",
                source=length.source,
            )
        )
    slow = misleading(stages)
    if slow is not None:
        found.append(words("staged.busy_is_not_speed", technique=slow.technique.split()[0]))
    if article and before_s and after_s:
        found.append(_article(article, first, last, before_s / after_s))
    marks: list[Text] = []
    if any("run" in (stage.source, stage.alone_source) for stage in stages):
        marks.append(words("staged.what_one_run_is"))
    if any(stage.alone_source == "screen" for stage in stages):
        marks.append(words("staged.what_screened_is"))
    if marks:
        found.append(words("staged.marks", marks=tuple(marks)))
    return tuple(found)


def _article(article: Article, first: StagedRow, last: StagedRow, ratio: float) -> Sentence:
    low, high = article.utilisation
    slow, fast = article.minutes
    return words(
        "staged.article",
        low=format_share(low),
        high=format_share(high),
        slow=f"{slow:.0f}",
        fast=f"{fast:.0f}",
        ratio=format_ratio(slow / fast),
        own_low=format_share(first.utilisation or 0.0),
        own_high=format_share(last.utilisation or 0.0),
        own_ratio=format_ratio(ratio),
    )
