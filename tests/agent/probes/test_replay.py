"""Replayed batches: real scripts whose data cost nothing, and that notice nothing else."""

import importlib.util

import pytest

from flatout.records.trial import Outcome
from tests.paths import ROOT
from tests.support.probed import SCRIPTS, probed

pytestmark = pytest.mark.slow

COMPAT = ROOT / "tests/scripts/public"


def replayed(script, *arguments, what="host", address, **options):
    probes = {"replay": {"what": what, "loaders": [address]}}
    return probed(script, *arguments, probes=probes, **options)


def batches(kind, what="host"):
    functions = "loader<batches.py:<module>"
    return replayed(SCRIPTS / "batches.py", kind, what=what, address=f"batches.py:{functions}#0")


@pytest.mark.parametrize(
    "kind",
    [
        "dict",
        "no_worker",
        "endless",
        "short_stream",
        "own_class",
        "shapes",
        "in_place",
        "input_gradient",
    ],
)
def test_the_training_goes_on_over_replayed_batches(kind):
    trial = batches(kind)

    assert trial.outcome is Outcome.OK, trial.traceback
    assert trial.details["errors"] == []
    seen = trial.details["probes"]["replay"]
    assert seen["replayed"] > 4
    assert seen["kept"] == 4
    assert trial.profile.samples_per_step == 8


def test_batches_that_a_script_changes_in_place_are_restored():
    seen = batches("in_place").details["probes"]["replay"]

    # Each of the four is handed out again and again, changed every time.
    assert seen["restored"] >= seen["replayed"] - 4


def test_batches_may_lie_on_the_training_device():
    trial = batches("dict", what="device")

    assert trial.outcome is Outcome.OK, trial.traceback
    assert trial.details["probes"]["replay"]["device"] == "cpu"


def test_samples_may_be_made_beside_the_training():
    functions = "loader<batches.py:<module>"
    address = f"batches.py:{functions}#0"
    probes = {"replay": {"what": "host", "loaders": [address], "company": 2}}
    trial = probed(SCRIPTS / "batches.py", "no_worker", probes=probes)

    assert trial.outcome is Outcome.OK, trial.traceback
    assert trial.details["errors"] == []
    seen = trial.details["probes"]["replay"]
    assert seen["replayed"] > 4
    assert len(seen["trained_s"]) == seen["replayed"] - 1
    assert min(seen["trained_s"]) > 0


def test_a_loader_with_iterators_of_its_own_is_told():
    trial = batches("own_iterator")

    assert trial.details["probes"]["replay"]["replayed"] == 0


@pytest.mark.parametrize(
    ("script", "arguments", "needs"),
    [
        ("accelerate_loop", ("--cpu",), "accelerate"),
        ("lightning_module", (), "lightning"),
        ("hf_trainer", (), "transformers"),
    ],
)
def test_frameworks_train_on_replayed_batches(script, arguments, needs):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}: pip install flatout[frameworks]")
    path = COMPAT / f"{script}.py"
    plain = probed(path, *arguments, probes={}, steps=4)
    known = [loader.address for loader in plain.profile.training_loaders]

    trial = replayed(path, *arguments, address=known[0], steps=12)

    assert trial.outcome is Outcome.OK, trial.traceback
    assert trial.details["probes"]["replay"]["replayed"] > 4
    assert trial.profile.models[0].name == plain.profile.models[0].name
