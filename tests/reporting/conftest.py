import json

import pytest

from flatout.records.ablation import ablation_from_json
from flatout.records.profile import profile_from_json
from flatout.records.trial import trial_from_json
from tests.paths import ROOT

DATA = ROOT / "tests/reporting/data"
"""Made by hand for these tests: no machine measured them."""


def stored(name):
    return json.loads((DATA / f"{name}.json").read_text())


@pytest.fixture
def starved():
    """A profile of a job that waits for data."""
    return profile_from_json(stored("profile_starved"))


@pytest.fixture
def busy():
    """A profile of a job that computes all the time."""
    return profile_from_json(stored("profile_busy"))


@pytest.fixture
def tuned():
    """A tuning that kept three techniques of eight; every verdict occurs."""
    return ablation_from_json(stored("ablation_tuned"))


@pytest.fixture
def leave():
    """A tuning that found nothing worth changing."""
    return ablation_from_json(stored("ablation_leave"))


@pytest.fixture
def crash():
    """A trial whose script failed."""
    return trial_from_json(stored("trial_crash"))
