import json

import pytest

from benchmarks.gpu_memory import calibration_document, file_name
from flatout.hardware.catalogue import CATALOGUE, find_gpu
from flatout.planner import workspaces
from flatout.planner.workspaces import find_calibration, with_environment
from flatout.records.plan import NumberSource
from flatout.records.units import MIB


@pytest.mark.parametrize("name", CATALOGUE)
def test_without_a_measurement_everything_is_assumed_with_an_interval(tmp_path, monkeypatch, name):
    (tmp_path / "assumed.json").write_text(workspaces.ASSUMED.read_text())
    monkeypatch.setattr(workspaces, "FOLDER", tmp_path)
    monkeypatch.setattr(workspaces, "ASSUMED", tmp_path / "assumed.json")

    found = find_calibration(find_gpu(name), "2.13.0")

    for amount in (found.context, found.nccl, found.cublas_workspace):
        assert amount.source is NumberSource.ASSUMED
        assert amount.low <= amount.bytes <= amount.high


def test_hopper_gets_the_larger_workspace():
    assert find_calibration(find_gpu("h100"), "2.13").cublas_workspace.bytes == 32 * MIB
    assert find_calibration(find_gpu("l4"), "2.13").cublas_workspace.bytes == 8_519_680
    assert find_calibration(find_gpu("mi300x"), "2.13").cublas_workspace.bytes == 128 * MIB


@pytest.mark.parametrize(
    ("text", "size"),
    [(":4096:8", 32 * MIB), (":16:8", 128 * 1024), (":4096:2:16:8", 8_519_680), ("", 8_519_680)],
)
def test_the_workspace_is_what_the_environment_asks_for(text, size):
    found = find_calibration(find_gpu("l4"), "2.13")

    asked = with_environment(found, {"CUBLAS_WORKSPACE_CONFIG": text})

    assert asked.cublas_workspace.bytes == asked.cublas_workspace.high == size


def test_a_file_of_this_gpu_is_found_and_that_of_this_torch_preferred(tmp_path, monkeypatch):
    (tmp_path / "assumed.json").write_text(workspaces.ASSUMED.read_text())
    monkeypatch.setattr(workspaces, "FOLDER", tmp_path)
    monkeypatch.setattr(workspaces, "ASSUMED", tmp_path / "assumed.json")
    for torch, size in (("2.11.0", 111), ("2.13.0+cu130", 222)):
        plain = calibration_document("l4", torch, {"context": (size, "made up")}, {"trace": 0.002})
        (tmp_path / file_name("l4", torch)).write_text(json.dumps(plain))

    same = find_calibration(find_gpu("l4"), "2.11.1")
    other = find_calibration(find_gpu("l4"), "2.14.0")

    assert (same.context.bytes, same.context.source) == (111, NumberSource.CALIBRATED)
    assert same.trace_error == 0.002
    assert other.context.source is NumberSource.ASSUMED
    assert other.context.bytes in (111, 222)
    assert other.trace_error is None
    assert find_calibration(find_gpu("t4"), "2.11.1").context.bytes not in (111, 222)
