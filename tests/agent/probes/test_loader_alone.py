"""The training loader drained by itself: its rate is the data set's, not the step's."""

import pytest

from flatout.analysis.regime import loaders_per_s
from flatout.records.trial import Outcome
from tests.support.probed import SCRIPTS, probed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_alone_gives_what_its_data_set_gives(workers):
    probes = {"loader_alone": {"max_s": 2.0}}

    trial = probed(SCRIPTS / "slow_data.py", str(workers), probes=probes, steps=4)

    assert trial.outcome is Outcome.OK, trial.traceback
    assert trial.details["errors"] == []
    seen = trial.details["probes"]["loader_alone"]
    assert len(seen["loaders"]) == 1  # the other one feeds no training
    # 50 samples a second for each process that makes them, less what sleeping is late; the
    # training itself takes 4 samples in 0.28 s, 14 a second.
    made_by = max(workers, 1)
    assert 25 * made_by < loaders_per_s(seen) < 53 * made_by


def test_the_draining_is_bounded_by_batches():
    probes = {"loader_alone": {"max_batches": 5}}

    trial = probed(SCRIPTS / "slow_data.py", "0", probes=probes, steps=4)

    (drained,) = trial.details["probes"]["loader_alone"]["loaders"].values()
    assert drained["samples"] == [4] * 5
