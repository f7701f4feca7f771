"""Trials of scripts that share memory, or save there: nothing of theirs stays."""

import os
from pathlib import Path

import pytest

from flatout.core.trial import Outcome
from tests.left_behind import left_behind, left_since
from tests.workflow.trial_runs import trial_of

pytestmark = pytest.mark.slow


@pytest.fixture
def saved():
    """A checkpoint that a real training keeps in memory."""
    path = Path(f"/dev/shm/flatout-test-{os.getpid()}.pt")
    path.write_text("of the real training")
    yield path
    path.unlink()


def test_a_trial_leaves_shared_memory_as_it_was_and_so_the_next_one_trains(saved):
    before = left_behind()

    trials = [trial_of(f"shares_memory.py {saved.stem} {turn}") for turn in ("first", "second")]

    assert [trial.outcome for trial in trials] == [Outcome.OK] * 2, trials[1].traceback
    assert left_since(before) == set()
    assert saved.read_text() == "of the real training"
