"""The report on one profile as one HTML file: nothing is loaded and nothing runs.

`profile_html` is the page; `step_plot` and its kin are the drawings: pure numbers, no markup.
"""

import base64
import hashlib
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from flatout.records.messages import ENGLISH, Messages, messages, written
from flatout.records.profile import PHASES, Profile
from flatout.records.units import format_bytes, format_ms, format_rate, format_share
from flatout.reporting.blocks import WORD_COLUMNS, Advice
from flatout.reporting.profile.sentences import headline, left_out, readings, warnings
from flatout.reporting.profile.tables import details, phases
from flatout.reporting.templates import read_text, render

WIDTH = 1000.0
HEIGHT = 100.0
HEADROOM = 1.06
"""A curve that touches its frame looks cut."""
MAX_TIMES_MEDIAN = 3.0
"""One step of ten times the median would press all others flat; such columns are cut."""
GAP_BELOW = 120
"""More columns than this stand without a gap, which would be less than a pixel on a phone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of a plot, in a phase's colour."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    told: str
    """What a pointer that rests on it shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One drawing with its axes in words.

    It is 1000 wide and 100 high and is stretched to its place; letters stand outside it, in HTML,
    so that nothing is scaled on a phone.
    """

    name: str
    told: str
    """The drawing in words, for those who do not see it."""
    boxes: tuple[Box, ...] = ()
    line: str = ""
    """A curve, as the points of a polyline."""
    area: str = ""
    """The same, closed to the ground."""
    peak: tuple[float, float] | None = None
    top: str = ""
    """What the upper edge stands for."""
    left: str = ""
    right: str = ""


def step_plot(profile: Profile, say: Messages) -> Plot:
    """Return the phases of the median step, in their order, as one bar."""
    boxes, x, words = [], 0.0, []
    for phase in PHASES:
        share, name = profile.share(phase), say(f"phase.{phase}")
        spent = format_ms(profile.phases_ms[phase])
        told = say("chart.part", name=name, time=spent, share=format_share(share))
        if share > 0:
            boxes.append(_box(phase, x, 0.0, WIDTH * share, HEIGHT, told))
            words.append(told)
        x += WIDTH * share
    return Plot(
        name="step",
        told=say("chart.step", phases="; ".join(words)),
        boxes=tuple(boxes),
        left=format_ms(0),
        right=format_ms(profile.step_ms.median),
    )


def memory_plot(profile: Profile, say: Messages) -> Plot | None:
    """Return the curve of the allocated memory over a step; None where no pass looked."""
    story = profile.memory
    if story is None or len(story.timeline) < 2:
        return None
    top = max(story.peak_bytes, *(count for _ms, count in story.timeline)) * HEADROOM
    if top <= 0:
        return None
    end = story.timeline[-1][0]
    points = list(_steps(story.timeline))
    line, area = _curve(points, top)
    at_ms, most = max(story.timeline, key=lambda point: point[1])
    duration = format_ms(end)
    return Plot(
        name="memory",
        told=say("chart.memory", duration=duration, peak=format_bytes(most)),
        line=line,
        area=area,
        peak=(round(WIDTH * at_ms / end, 1) if end else 0.0, _y(most, top)),
        top=say("chart.peak", size=format_bytes(most)),
        left=format_ms(0),
        right=duration,
    )


def steps_plot(profile: Profile, say: Messages) -> Plot | None:
    """Return the measured steps as columns of their phases; None where none were kept."""
    rows = profile.steps_ms
    if not rows:
        return None
    longest = max(map(sum, rows)) or 1.0
    top = steps_top(profile)
    slot = WIDTH / len(rows)
    width = slot * (0.86 if len(rows) < GAP_BELOW else 1.0)
    boxes = []
    for number, row in enumerate(rows):
        told = say("chart.step_number", n=number + 1, time=format_ms(sum(row)))
        ground = HEIGHT
        for phase, ms in zip(PHASES, row, strict=True):
            height = min(HEIGHT * ms / top, ground)
            ground -= height
            if height > 0:
                boxes.append(_box(phase, number * slot, ground, width, height, told))
    words = format_ms(longest)
    return Plot(
        name="steps",
        told=say("chart.steps", n=len(rows), longest=words),
        boxes=tuple(boxes),
        top=format_ms(top),
        left="1",
        right=str(len(rows)),
    )


def steps_top(profile: Profile) -> float:
    """Return the milliseconds that the height of the steps' plot stands for."""
    spent = [sum(row) for row in profile.steps_ms]
    return (min(max(spent), MAX_TIMES_MEDIAN * statistics.median(spent)) or 1.0) * HEADROOM


def steps_cut(profile: Profile) -> tuple[int, float]:
    """Return how many steps reach beyond the plot, and the longest in milliseconds."""
    spent = [sum(row) for row in profile.steps_ms]
    if not spent:
        return 0, 0.0
    return sum(ms > steps_top(profile) for ms in spent), max(spent)


def gpu_plots(profile: Profile, say: Messages) -> tuple[Plot, ...]:
    """Return GPU-Util over time and the samples per second below it."""
    gpu = profile.gpu
    if gpu is None or len(gpu.series) < 2:
        return ()
    util = [share for _s, share in gpu.series]
    line, area = _curve(list(gpu.series), HEADROOM)
    duration = format_ms(1e3 * gpu.series[-1][0])
    plots = [
        Plot(
            name="gpu_util",
            told=say("chart.gpu", duration=duration, median=format_share(statistics.median(util))),
            line=line,
            area=area,
            top=format_share(1.0),
            left=format_ms(0),
            right=duration,
        )
    ]
    if speed := _speed_plot(profile, say):
        plots.append(speed)
    return tuple(plots)


def _speed_plot(profile: Profile, say: Messages) -> Plot | None:
    spent = [sum(row) for row in profile.steps_ms if sum(row) > 0]
    if len(spent) < 2 or not profile.samples_per_step:
        return None
    rates = [1e3 * profile.samples_per_step / ms for ms in spent]
    ends = [sum(spent[: number + 1]) for number in range(len(spent))]
    top = max(rates) * HEADROOM
    line, area = _curve(list(zip(ends, rates, strict=True)), top)
    return Plot(
        name="speed_axis",
        told=say("chart.speed", median=format_rate(statistics.median(rates))),
        line=line,
        area=area,
        top=format_rate(top),
        left=format_ms(0),
        right=format_ms(ends[-1]),
    )


def _box(kind: str, x: float, y: float, width: float, height: float, told: str) -> Box:
    x, y, width, height = (round(value, 2) for value in (x, y, width, height))
    return Box(kind=kind, x=x, y=y, width=width, height=height, told=told)


def _steps(points: Sequence[tuple[float, int]]) -> Iterator[tuple[float, float]]:
    """Yield the corners of a staircase: memory stays as it is until the next change."""
    before = points[0][1]
    for at, count in points:
        yield at, before
        yield at, count
        before = count


def _curve(points: Sequence[tuple[float, float]], top: float) -> tuple[str, str]:
    """Return a curve and the area below it, from its first moment to its last."""
    start, end = points[0][0], points[-1][0]
    scale = WIDTH / (end - start) if end > start else 0.0
    corners = [f"{(at - start) * scale:.1f},{_y(value, top)}" for at, value in points]
    last = (end - start) * scale
    return " ".join(corners), " ".join([f"0,{HEIGHT:g}", *corners, f"{last:.1f},{HEIGHT:g}"])


def _y(value: float, top: float) -> float:
    return round(HEIGHT * (1 - value / top), 2)


MAIN_READINGS = ("step_time", "speed", "device_busy", "peak_memory")
"""What is in large letters; the words in brackets go below."""

WHOLE_ROWS = frozenset({"journey", "pipeline", "workers", "largest", "gpu"})
"""Sections with many columns, or with drawings; the others stand two in a row."""

UNIT = re.compile(r"(?<=\d) (%|[mu]?s|[GM]iB)(?![A-Za-z])")
"""A blank between a number and its unit."""


def profile_html(profile: Profile, *, workload: str = "train.py", language: str = ENGLISH) -> str:
    """Return the page: the answer, why, what to type next, the drawings, every table."""
    say = messages(language)
    style = read_text("profile.css")
    name, kind = profile.device_name, profile.device_kind
    numbers = [(name, say(f"label.{name}"), say.text(text)) for name, text in readings(profile)]
    return render(
        "profile.html.j2",
        {
            "say": say,
            "language": language,
            # The style is a file of ours and holds nothing of the user's.
            "style": Markup(style),  # noqa: S704  made by us
            "style_hash": _hash(style),
            "headline": _unbroken(say.text(headline(profile))),
            "warnings": [say.text(text) for text in warnings(profile)],
            "workload": workload,
            "where": say("headline.where", workload=workload, device=name, kind=kind),
            "tiles": [_tile(label, text) for name, label, text in numbers if name in MAIN_READINGS],
            "readings": [(label, text) for name, label, text in numbers],
            "findings": [
                _finding(Advice(finding=finding, workload=workload), say)
                for finding in profile.findings
            ],
            "next_command": f"flatout tune {workload}",
            "phase_names": [
                (phase, say(f"phase.{phase}")) for phase in PHASES if profile.share(phase) > 0
            ],
            "phases": phases(profile),
            "step_plot": step_plot(profile, say),
            "memory_plot": memory_plot(profile, say),
            "steps_cut": _cut(profile, say),
            "steps_plot": steps_plot(profile, say),
            "gpu_plots": gpu_plots(profile, say),
            "sections": details(profile),
            "whole": WHOLE_ROWS,
            "words": WORD_COLUMNS,
            "notes": [say.text(written(note)) for note in profile.notes],
            "left_out": [say.text(text) for text in left_out(profile)],
            "is_cut": profile.step_ms.n > len(profile.steps_ms),
        },
    )


def _unbroken(text: str) -> str:
    """Return large letters in which a unit stays with its number, and a particle with both."""
    return UNIT.sub("\u00a0\\1\u2060", text)


def _cut(profile: Profile, say: Messages) -> str:
    count, longest_ms = steps_cut(profile)
    return say("about.steps_cut", n=count, longest=format_ms(longest_ms)) if count else ""


def _tile(label: str, text: str) -> tuple[str, str, str]:
    """Return a label, what counts, and the rest in smaller letters."""
    main, bracket, rest = text.partition(" (")
    if not bracket:
        main, comma, rest = text.partition(", ")
        return label, main, rest if comma else ""
    return label, main, rest.removesuffix(")")


def _finding(advice: Advice, say: Messages) -> dict[str, str | float]:
    return {
        "code": advice.finding.code,
        "share": say.text(advice.share),
        "width": round(100 * min(1.0, max(0.0, advice.finding.share)), 1),
        "because": say.text(advice.because),
        "next": advice.next(say),
        "source": "".join(say.text(text) for _label, text in advice.source),
    }


def _hash(style: str) -> str:
    """Return what the page's policy allows as its only style."""
    return base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
