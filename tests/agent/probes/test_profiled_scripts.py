"""Scripts that use torch's profiler themselves: theirs works, and ours gives way."""

import pytest

from flatout.agent.measuring.kernels import BARRED
from flatout.records.trial import Outcome
from tests.support.probed import SCRIPTS, probed

SCRIPT = SCRIPTS / "profiled.py"
PREPARED_BEFORE_OURS, STARTED_WHILE_OURS_RUNS = "1", "3"
"""Steps after which the script prepares its record. Probes begin after the third."""


@pytest.mark.slow
@pytest.mark.parametrize("wait", [PREPARED_BEFORE_OURS, STARTED_WHILE_OURS_RUNS])
@pytest.mark.parametrize(
    ("probe", "options"),
    [("memory", {"steps": 8}), ("operator_times", {"steps": 8}), ("trace", {"skip": 2})],
)
def test_the_scripts_own_record_is_whole_and_ours_gives_way(probe, options, wait):
    trial = probed(SCRIPT, wait, probes={probe: options}, steps=20)

    assert trial.outcome is Outcome.OK, trial.traceback
    assert trial.details["errors"] == []
    seen = trial.details["probes"][probe]
    if probe == "memory":
        assert seen["notes"] == [["own_profiler", ""]]
    elif probe == "trace":
        assert (seen["file"], seen["why"]) == ("", BARRED)
    else:
        assert (seen["steps"], seen["operators"]) == (0, [])
