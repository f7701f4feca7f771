import functools
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from flatout.analysis.memory import sync_points
from flatout.records.profile import profile_from_json
from flatout.records.recipe import Recipe
from flatout.records.trial import Workload
from flatout.tuning.passes import PassRunner, detail
from tests.paths import ROOT
from tests.support.trial_runs import copy_scripts, machine, trial_of
from tests.techniques.facts import profile


class Everything(dict):
    """Probes by name, as something that a cache can remember."""

    def __hash__(self):
        return hash(tuple(self))


TESTS = ROOT / "tests"


def detailed(folder, script):
    """Return an empty profile after the detail pass over a script."""
    workload = Workload(target=script, folder=folder, python=sys.executable)
    runner = PassRunner(workload=workload, recipe=Recipe(), machine=machine(), limit_s=120.0)
    return detail.add(profile(), runner)


@functools.cache
def seen(script):
    folder = copy_scripts()
    try:
        return detailed(folder, script)
    finally:
        shutil.rmtree(folder.parent)


def alone(script):
    """Return the profile of a script of the compatibility tests."""
    folder = Path(tempfile.mkdtemp(prefix="flatout-test-"))
    shutil.copy(TESTS / "scripts/public" / script, folder)
    try:
        return detailed(folder, script)
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["plain_loop.py", "grad_scaler.py", "gan.py", "own_update.py"])
def test_scripts_of_all_kinds_get_their_memory_story(script):
    found = seen(script)

    assert found.memory.peak_bytes == max(found.memory.by_phase.values()) > 0
    assert found.memory.steps == detail.OBSERVED_STEPS
    assert found.memory.leak_bytes_per_step == 0.0
    assert found.notes == ()


@pytest.mark.slow
def test_looking_changes_no_loss():
    watched = trial_of("plain_loop.py", steps=12, probes=Everything(memory={}, syncs={}))
    plain = trial_of("plain_loop.py", steps=12)

    assert set(watched.details["probes"]) == {"memory", "syncs"}
    assert watched.profile.losses[:12] == plain.profile.losses[:12]


@pytest.mark.slow
def test_what_the_script_compiled_is_left_compiled_and_the_report_says_what_is_missing():
    found = seen("user_compiled.py")

    assert found.memory.peak_bytes > 0
    assert found.notes == (
        "memory: no modules, and lines of phases only: the model is compiled",
        "syncs: only methods of tensors were watched: the model is compiled",
    )


@pytest.mark.slow
def test_a_frameworks_loop_is_named_by_the_line_that_started_it():
    pytest.importorskip("transformers")

    found = alone("hf_trainer.py")

    assert found.notes == ()
    assert all(sync.line.startswith("hf_trainer.py:") for sync in found.syncs)
    assert {"forward", "backward", "optimizer"} <= set(found.memory.by_phase)


@pytest.mark.slow
def test_the_profile_survives_its_json():
    found = seen("gan.py")

    assert profile_from_json(found.to_json()) == found


@pytest.mark.slow
def test_a_script_that_profiles_itself_keeps_its_profiler(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(60):\n"
        "    if step == 5:\n"
        "        profiler = torch.profiler.profile(\n"
        "            activities=[torch.profiler.ProfilerActivity.CPU]\n"
        "        )\n"
        "        profiler.start()\n"
        "    model(torch.randn(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    if step == 8:\n"
        "        profiler.stop()\n"
        "        assert len(profiler.key_averages()) > 0\n"
    )

    found = detailed(tmp_path, "train.py")

    assert found.memory is None
    assert "memory: the script uses torch's profiler itself" in found.notes


def test_a_script_that_fails_leaves_the_profile_with_a_note(tmp_path):
    (tmp_path / "train.py").write_text("raise RuntimeError('no data')\n")

    found = detailed(tmp_path, "train.py")

    assert found.memory is None
    assert found.notes[-1].startswith("no detail pass: the script failed")
    assert "RuntimeError: no data" in found.notes[-1]


@pytest.mark.parametrize(("on_device", "ms"), [(False, 2.5), (True, 10.0)])
def test_what_watching_takes_is_left_out_where_a_call_takes_its_own_time(on_device, ms):
    # 385 calls of .item() were said to cost 100 % of a step of which 32 % were spent elsewhere.
    seen = {"steps": 1, "on_device": on_device, "points": [["train.py:9", "item", 128, 0.01]]}

    (point,) = sync_points(seen, 0.25)

    assert point.ms_per_step == pytest.approx(ms)
