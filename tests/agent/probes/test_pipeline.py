"""The legs of a sample: where a script's loader spends its time is told by what it calls."""

import pytest

from flatout.analysis.journey import pipeline_of
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome
from tests.support.probed import SCRIPTS, probed
from tests.techniques.facts import machine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_of_photographs_is_told_apart(workers):
    probes = {"pipeline": {"max_s": 1.0, "company": workers}}

    trial = probed(SCRIPTS / "picture_loop.py", str(workers), probes=probes, steps=12)

    assert trial.outcome is Outcome.OK, trial.traceback
    assert trial.details["errors"] == []
    found = pipeline_of(trial.details["probes"]["pipeline"], trial.profile, machine(), ())
    by_name = {stage.name: stage for stage in found.stages}
    # Noise of 640 x 480 is dear to decode; every twentieth pixel is looked at after it.
    assert by_name["decode"].share == max(stage.share for stage in found.stages)
    assert 0 < by_name["transform"].share < by_name["decode"].share
    assert 0 < by_name["normalise"].share < by_name["decode"].share
    assert by_name["transport"].cpu_ms > 0
    assert sum(stage.share for stage in found.stages) == pytest.approx(1.0)
    assert by_name["read"].bytes > 100_000
    assert by_name["collate"].bytes == pytest.approx(3 * 64 * 48 * 4 + 8)
    assert found.missing == {}


def test_a_data_set_that_sleeps_is_blocked_and_takes_no_core():
    probes = {"pipeline": {"max_s": 1.0}}

    trial = probed(SCRIPTS / "slow_data.py", "2", probes=probes, steps=4)

    assert trial.outcome is Outcome.OK, trial.traceback
    assert trial.details["errors"] == []
    found = pipeline_of(trial.details["probes"]["pipeline"], trial.profile, machine(), ())
    (read,) = (stage for stage in found.stages if stage.name == "read")
    assert read.wait_ms > 15  # it sleeps for 20 ms a sample
    assert found.cpu_ms < read.wait_ms


def test_under_a_recipe_a_sample_is_made_and_sent_the_recipes_way():
    """Bytes travel and are scaled by the loop; the decoder is swapped as in a worker."""
    techniques = ("device_preprocess", "fast_decode")
    recipe = Recipe(choices=tuple(Choice(technique=name) for name in techniques))
    script = SCRIPTS / "picture_loop.py"

    plain, ours = (
        probed(script, "2", probes={"pipeline": {"max_s": 1.0}}, recipe=each, steps=12)
        for each in (Recipe(), recipe)
    )
    address = ours.profile.training_loaders[0].address
    replay = {"what": "host", "loaders": [address]}
    free = probed(script, "2", probes={"replay": replay}, recipe=recipe)

    assert {x.technique: x.status for x in ours.applied} == dict.fromkeys(techniques, "applied")
    assert ours.details["errors"] == []
    before, after = (
        {
            x.name: x
            for x in pipeline_of(t.details["probes"]["pipeline"], t.profile, machine(), ()).stages
        }
        for t in (plain, ours)
    )
    assert before["transport"].bytes == pytest.approx(3 * 64 * 48 * 4 + 8)
    assert after["transport"].bytes == pytest.approx(3 * 64 * 48 + 8)
    assert free.outcome is Outcome.OK, free.traceback
    assert free.details["probes"]["replay"]["replayed"] > 4
