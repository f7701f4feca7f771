"""The report on one profile as one HTML file: nothing is loaded and nothing runs."""

import base64
import hashlib
import re

from markupsafe import Markup

from flatout.core.finding import Finding
from flatout.core.profile import PHASES, Profile
from flatout.core.units import format_ms, format_share
from flatout.reporting.charts import gpu_plots, memory_plot, step_plot, steps_cut, steps_plot
from flatout.reporting.messages import ENGLISH, Messages, messages
from flatout.reporting.profile_tables import WORD_COLUMNS, Sheet, phases, sheets
from flatout.reporting.profile_words import because, headline, left_out, notes, readings, warnings
from flatout.reporting.templates import read_text, render
from flatout.reporting.words import advice_words

MAIN_READINGS = ("step_time", "speed", "device_busy", "peak_memory")
"""What stands in large letters; the words in brackets go below."""

WHOLE_ROWS = frozenset({"journey", "workers", "largest", "gpu"})
"""Sections with many columns, or with drawings; the others stand two in a row."""

UNIT = re.compile(r"(?<=\d) (%|[mu]?s|[GM]iB)(?![A-Za-z])")
"""A blank between a number and its unit."""


def profile_html(profile: Profile, *, workload: str = "train.py", language: str = ENGLISH) -> str:
    """Return the page: the answer, why, what to type next, the drawings, every table.

    Args:
        profile: What was measured.
        workload: What the user would type after `python`.
        language: One of `flatout.reporting.messages.LANGUAGES`.
    """
    say = messages(language)
    style = read_text("profile.css")
    name, kind = profile.device_name, profile.device_kind
    numbers = [(name, say(f"label.{name}"), text) for name, text in readings(profile, say)]
    return render(
        "profile.html.j2",
        {
            "say": say,
            "language": language,
            # The style is a file of ours and holds nothing of the user's.
            "style": Markup(style),  # noqa: S704  made by us
            "style_hash": _hash(style),
            "headline": _unbroken(headline(profile, say)),
            "warnings": warnings(profile, say),
            "workload": workload,
            "where": say("headline.where", workload=workload, device=name, kind=kind),
            "tiles": [_tile(label, text) for name, label, text in numbers if name in MAIN_READINGS],
            "readings": [(label, text) for name, label, text in numbers],
            "findings": [_finding(finding, say, workload) for finding in profile.findings],
            "next_command": f"flatout tune {workload}",
            "phase_names": [
                (phase, say(f"phase.{phase}")) for phase in PHASES if profile.share(phase) > 0
            ],
            "phases": phases(profile, say),
            "step_plot": step_plot(profile, say),
            "memory_plot": memory_plot(profile, say),
            "steps_cut": _cut(profile, say),
            "steps_plot": steps_plot(profile, say),
            "gpu_plots": gpu_plots(profile, say),
            "sheets": _grouped(sheets(profile, say)),
            "whole": WHOLE_ROWS,
            "words": WORD_COLUMNS,
            "notes": notes(profile, say),
            "left_out": left_out(profile, say),
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


def _finding(finding: Finding, say: Messages, workload: str) -> dict[str, str | float]:
    return {
        "code": finding.code,
        "share": format_share(finding.share),
        "of": say(f"finding_of.{'bound' if finding.is_bound else finding.of}"),
        "width": round(100 * min(1.0, max(0.0, finding.share)), 1),
        "because": because(finding, say),
        "next": advice_words(say.translated(finding.next), workload),
    }


def _grouped(tables: tuple[Sheet, ...]) -> list[tuple[str, list[Sheet]]]:
    """Return the tables by their title: those that follow each other under one stand together."""
    groups: list[tuple[str, list[Sheet]]] = []
    for sheet in tables:
        if groups and groups[-1][0] == sheet.name:
            groups[-1][1].append(sheet)
        else:
            groups.append((sheet.name, [sheet]))
    return groups


def _hash(style: str) -> str:
    """Return what the page's policy allows as its only style."""
    return base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
