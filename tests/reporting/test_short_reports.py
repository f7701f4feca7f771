"""What measure and tune print fits on a screen, for every result that is kept here."""

import json
import shlex
from dataclasses import replace

import pytest

from flatout.records.ablation import ablation_from_json
from flatout.records.messages import LANGUAGES, messages, words
from flatout.records.profile import profile_from_json
from flatout.reporting.profile.text import render_partial, render_profile
from flatout.reporting.tuning.text import render_ablation
from tests.paths import ROOT

MOST_LINES = 25
FILES = sorted(
    [
        *(ROOT / "tests/reporting/data").glob("*.json"),
        *ROOT.glob("benchmarks/records/*/result.json"),
    ]
)


def found(plain, is_wanted):
    """Yield the documents of a kind within one, however deep."""
    if isinstance(plain, dict) and is_wanted(plain):
        yield plain
    elif isinstance(plain, dict | list):
        for item in plain.values() if isinstance(plain, dict) else plain:
            yield from found(item, is_wanted)


def stored(is_wanted):
    return [
        pytest.param(plain, id=f"{path.parent.name}-{path.stem}-{number}")
        for path in FILES
        for number, plain in enumerate(found(json.loads(path.read_text()), is_wanted))
    ]


ABLATIONS = stored(lambda plain: {"rows", "baseline", "workload"} <= set(plain))
PROFILES = stored(lambda plain: plain.get("schema") == "flatout.profile/1")


@pytest.mark.parametrize("plain", ABLATIONS)
def test_what_tune_prints_fits_on_a_screen(plain):
    for language in LANGUAGES:
        text = render_ablation(ablation_from_json(plain), language=language)

        # The line that names the files comes below it.
        assert len(text.splitlines()) < MOST_LINES
        assert is_a_command(text.splitlines()[-1])


@pytest.mark.parametrize("plain", PROFILES)
@pytest.mark.parametrize("room", [12, 20, None])
def test_what_was_seen_before_a_bad_end_fits_below_it_and_says_nothing_next(plain, room):
    whole = profile_from_json(plain)
    profile = replace(whole, notes=(*whole.notes, words("note.partial", n="12")))
    for language in LANGUAGES:
        lines = render_partial(profile, room=room, language=language).splitlines()

        assert len(lines) <= (room or len(lines))
        assert "12" in lines[0]
        assert not any(line.startswith(messages(language)("label.next")) for line in lines)


@pytest.mark.parametrize("plain", PROFILES)
def test_what_measure_prints_fits_on_a_screen(plain):
    for language in LANGUAGES:
        text = render_profile(profile_from_json(plain), workload="'my train.py'", language=language)

        assert len(text.splitlines()) <= MOST_LINES
        assert shlex.split(text.splitlines()[-1])[-1] == "my train.py"


def is_a_command(line):
    """Return whether a line ends with a command that a shell can split."""
    return any(word in ("flatout", "python") for word in shlex.split(line))


def test_there_are_results_to_look_at():
    assert len(ABLATIONS) >= 8
    assert len(PROFILES) >= 2
