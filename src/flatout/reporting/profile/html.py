"""The report on one profile as one HTML file, with its drawings: nothing is loaded or runs."""

import base64
import hashlib
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

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
MAIN_READINGS = ("step_time", "speed", "device_busy", "peak_memory")
"""What is in large letters; the words in brackets go below."""
WHOLE_ROWS = frozenset({"journey", "pipeline", "workers", "largest", "gpu"})
"""Sections with many columns, or with drawings; the others stand two in a row."""
UNIT = re.compile(r"(?<=\d) (%|[mu]?s|[GM]iB)(?![A-Za-z])")
"""A blank between a number and its unit."""


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
    top: str
    """What the upper edge stands for."""
    left: str
    right: str
    note: str = ""
    """What it does not show."""


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
            # What the page's policy allows as its only style.
            "style_hash": base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
            # A unit stays with its number, and a particle with both.
            "headline": UNIT.sub("\u00a0\\1\u2060", say.text(headline(profile))),
            "warnings": [say.text(text) for text in warnings(profile)],
            "workload": workload,
            "where": say("headline.where", workload=workload, device=name, kind=kind),
            "tiles": [_tile(label, text) for name, label, text in numbers if name in MAIN_READINGS],
            "readings": [(label, text) for name, label, text in numbers],
            "findings": [Advice(finding=one, workload=workload) for one in profile.findings],
            "next_command": f"flatout tune {workload}",
            "phase_names": [
                (phase, say(f"phase.{phase}")) for phase in PHASES if profile.share(phase) > 0
            ],
            "phases": phases(profile),
            "step_plot": step_plot(profile, say),
            "memory_plot": memory_plot(profile, say),
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


def _tile(label: str, text: str) -> tuple[str, str, str]:
    """Return a label, what counts, and the rest in smaller letters."""
    main, _, rest = text.partition(" (" if " (" in text else ", ")
    return label, main, rest.removesuffix(")")


def step_plot(profile: Profile, say: Messages) -> Plot:
    """Return the phases of the median step, in their order, as one bar."""
    boxes, x = [], 0.0
    for phase in PHASES:
        share, spent = profile.share(phase), format_ms(profile.phases_ms[phase])
        name = say(f"phase.{phase}")
        told = say("chart.part", name=name, time=spent, share=format_share(share))
        if share > 0:
            boxes.append(_box(phase, x, 0.0, WIDTH * share, HEIGHT, told))
        x += WIDTH * share
    return Plot(
        name="step",
        told=say("chart.step", phases="; ".join(box.told for box in boxes)),
        boxes=tuple(boxes),
        top="",
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
    # Memory stays as it is until the next change: a staircase.
    before = (story.timeline[0], *story.timeline)
    points = [
        corner
        for (_, held), (at, count) in zip(before, story.timeline, strict=False)
        for corner in ((at, held), (at, count))
    ]
    at_ms, most = max(story.timeline, key=lambda point: point[1])
    told = say("chart.memory", duration=format_ms(end), peak=format_bytes(most))
    peak = (round(WIDTH * at_ms / end, 1) if end else 0.0, _y(most, top))
    edge = say("chart.peak", size=format_bytes(most))
    return replace(_curve("memory", told, points, top, edge, format_ms(end)), peak=peak)


def steps_plot(profile: Profile, say: Messages) -> Plot | None:
    """Return the measured steps as columns of their phases; None where none were kept."""
    rows = profile.steps_ms
    if not rows:
        return None
    spent = [sum(row) for row in rows]
    top = (min(max(spent), MAX_TIMES_MEDIAN * statistics.median(spent)) or 1.0) * HEADROOM
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
    longest = format_ms(max(spent) or 1.0)
    num_cut = sum(ms > top for ms in spent)
    return Plot(
        name="steps",
        told=say("chart.steps", n=len(rows), longest=longest),
        boxes=tuple(boxes),
        top=format_ms(top),
        left="1",
        right=str(len(rows)),
        note=say("about.steps_cut", n=num_cut, longest=longest) if num_cut else "",
    )


def gpu_plots(profile: Profile, say: Messages) -> tuple[Plot, ...]:
    """Return GPU-Util over time and the samples per second below it."""
    gpu = profile.gpu
    if gpu is None or len(gpu.series) < 2:
        return ()
    median = format_share(statistics.median(share for _s, share in gpu.series))
    duration = format_ms(1e3 * gpu.series[-1][0])
    told = say("chart.gpu", duration=duration, median=median)
    util = _curve("gpu_util", told, gpu.series, HEADROOM, format_share(1.0), duration)
    spent = [sum(row) for row in profile.steps_ms if sum(row) > 0]
    if len(spent) < 2 or not profile.samples_per_step:
        return (util,)
    rates = [1e3 * profile.samples_per_step / ms for ms in spent]
    points = list(zip(accumulate(spent), rates, strict=True))
    top = max(rates) * HEADROOM
    told = say("chart.speed", median=format_rate(statistics.median(rates)))
    end = format_ms(points[-1][0])
    return util, _curve("speed_axis", told, points, top, format_rate(top), end)


def _box(kind: str, x: float, y: float, width: float, height: float, told: str) -> Box:
    x, y, width, height = (round(value, 2) for value in (x, y, width, height))
    return Box(kind=kind, x=x, y=y, width=width, height=height, told=told)


def _curve(
    name: str, told: str, points: Sequence[tuple[float, float]], top: float, edge: str, until: str
) -> Plot:
    """Return a curve and the area below it, from its first moment to its last."""
    start, end = points[0][0], points[-1][0]
    scale = WIDTH / (end - start) if end > start else 0.0
    corners = [f"{(at - start) * scale:.1f},{_y(value, top)}" for at, value in points]
    last = (end - start) * scale
    return Plot(
        name=name,
        told=told,
        line=" ".join(corners),
        area=" ".join([f"0,{HEIGHT:g}", *corners, f"{last:.1f},{HEIGHT:g}"]),
        top=edge,
        left=format_ms(0),
        right=until,
    )


def _y(value: float, top: float) -> float:
    return round(HEIGHT * (1 - value / top), 2)
