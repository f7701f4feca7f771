"""What an epoch's start costs, in a real training."""

import pytest

from flatout.records.trial import Outcome
from tests.support.probed import SCRIPTS, probed


@pytest.mark.slow
def test_starting_the_workers_is_part_of_the_whole_step():
    trial = probed(SCRIPTS / "short_epochs.py", probes={})

    assert trial.outcome is Outcome.OK, trial.traceback
    profile = trial.profile
    assert profile.epoch_steps == 10
    # Two forks, 20 ms for the first batch of four, and two processes to wait for.
    assert profile.epoch_start_ms > 20
    expected = profile.step_ms.median + profile.epoch_start_ms / 10
    assert profile.whole_step_ms == pytest.approx(expected)
    assert profile.samples_per_s == pytest.approx(1e3 * 4 / profile.whole_step_ms)
