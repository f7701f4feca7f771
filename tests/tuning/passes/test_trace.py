"""Traces of a real script on the CPU: the file, its size, and what the summary says of it."""

import functools
import gzip
import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from flatout.records.errors import UserError
from flatout.records.recipe import Recipe
from flatout.records.trial import Workload
from flatout.tuning.passes.trace import check_target, target_of, write_trace
from flatout.tuning.trials import TrialOptions, run_trial
from flatout.workflow.measure import measure
from tests.support.trial_runs import copy_scripts, machine


@functools.cache
def measured(to_folder):
    """Return profile, the files that were written, and what was said."""
    folder, told = copy_scripts(), []
    out = Path(tempfile.mkdtemp(prefix="flatout-test-"))
    workload = Workload(target="plain_loop.py", folder=folder, python=sys.executable)
    try:
        trial = measure(
            workload,
            machine=machine(),
            trace=out if to_folder else out / "trace.json",
            tell=told.append,
        )
        files = {path.name: path.read_bytes() for path in out.iterdir()}
    finally:
        shutil.rmtree(folder.parent)
        shutil.rmtree(out)
    assert trial.profile is not None, trial.message
    return trial.profile, files, told


@pytest.mark.slow
def test_trace_is_one_that_viewers_open():
    _, files, _ = measured(to_folder=False)

    (content,) = files.values()
    names = {event.get("name", "") for event in json.loads(content)["traceEvents"]}
    assert "aten::addmm" in names
    assert any(name.startswith("Optimizer.step#AdamW") for name in names)


@pytest.mark.slow
def test_summary_of_a_real_trace_names_its_operators():
    profile, _, _ = measured(to_folder=False)

    trace = profile.trace
    calls = {entry.name: entry.calls_per_step for entry in trace.operators}
    assert trace.steps == 5
    # More where an evaluation is between the traced steps.
    assert calls["aten::addmm"] >= 2
    assert 0 < sum(entry.share for entry in trace.operators) < 1
    assert trace.missing["kernels"] == "no device kernels in the trace"


@pytest.mark.slow
def test_size_is_told_before_the_file_is_written():
    profile, files, told = measured(to_folder=False)

    assert f"to {profile.trace.path}" in told[-1]
    assert "5 steps" in told[-1]
    assert list(files) == [Path(profile.trace.path).name]


@pytest.mark.slow
def test_trace_in_a_folder_has_the_name_that_tensorboard_reads():
    profile, files, _ = measured(to_folder=True)

    (name,) = files
    assert name.endswith(".pt.trace.json.gz")
    assert profile.trace.file_bytes == len(files[name])
    assert b"ProfilerStep#" in gzip.decompress(files[name])


def seen_with(tmp_path, **options):
    folder = copy_scripts()
    workload = Workload(target="plain_loop.py", folder=folder, python=sys.executable)
    trial = run_trial(
        workload,
        Recipe(),
        machine(),
        TrialOptions(
            limit_s=120.0,
            steps=20,
            probes={"trace": {"skip": 3, "steps": 5} | options},
            keep=tmp_path,
            keep_names=("trace-*.json.gz",),
        ),
    )
    shutil.rmtree(folder.parent)
    return trial.details["probes"]["trace"]


@pytest.mark.slow
def test_fewer_steps_are_traced_where_five_would_be_too_large(tmp_path):
    one = seen_with(tmp_path, steps=1)["step_bytes"]

    seen = seen_with(tmp_path, max_bytes=int(2.9 * one))

    assert seen["steps"] == 2
    assert (tmp_path / seen["file"]).is_file()


@pytest.mark.slow
def test_step_that_is_too_large_alone_leaves_no_file(tmp_path):
    seen = seen_with(tmp_path, max_bytes=10)

    assert "one step alone makes" in seen["why"]
    assert list(tmp_path.iterdir()) == []


def test_target_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_trace(tmp_path / "missing.json.gz", tmp_path / "trace.json.gz")

    assert list(tmp_path.iterdir()) == []


def test_two_traces_of_a_folder_have_different_names(tmp_path):
    assert target_of(tmp_path, 1.0) != target_of(tmp_path, 2.0)


@pytest.mark.parametrize("name", ["trace.txt", "traces/"])
def test_name_that_no_viewer_opens_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="neither"):
        check_target(tmp_path / name)
