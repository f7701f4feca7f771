"""Trials of scripts that share memory: nothing of theirs stays."""

import os

import pytest

from flatout.records.trial import Outcome
from tests.left_behind import left_behind, left_since
from tests.support.trial_runs import trial_of

pytestmark = pytest.mark.slow


def test_a_trial_leaves_shared_memory_as_it_was_and_so_the_next_one_trains():
    before = left_behind()

    trials = [
        trial_of(f"shares_memory.py flatout-test-{os.getpid()} {turn}")
        for turn in ("first", "second")
    ]

    assert [trial.outcome for trial in trials] == [Outcome.OK] * 2, trials[1].traceback
    assert left_since(before) == set()
