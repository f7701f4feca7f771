import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from flatout.hardware import peaks
from flatout.hardware.peaks import Peaks, PeaksOf, forget_peaks, measure_in_child, read_peaks

HERE = PeaksOf(
    device_kind="cpu", device_name="some CPU", dtype="float32", threads=1, torch_version="1"
)

MADE_UP = Peaks(
    dtype="float32",
    gemm_flops_per_s=1.0,
    memory_bytes_per_s=2.0,
    copy_bytes_per_s=3.0,
    threads=1,
)


def test_peaks_are_measured_in_a_process_of_their_own():
    found = measure_in_child(HERE, sys.executable)

    assert found.dtype == "float32"
    assert found.threads == 1
    assert 0 < found.own_share < 1.1
    # A computer from 1990 and one that no one has built yet.
    assert 1e8 < found.gemm_flops_per_s < 1e16
    assert 1e8 < found.memory_bytes_per_s < 1e14
    assert 1e8 < found.copy_bytes_per_s < 1e14


def test_peaks_are_measured_once(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(peaks, "measure_in_child", lambda *given: calls.append(given) or MADE_UP)

    first = read_peaks(HERE, tmp_path, sys.executable)
    second = read_peaks(HERE, tmp_path, sys.executable)
    forget_peaks(HERE, tmp_path)
    read_peaks(HERE, tmp_path, sys.executable)

    assert first == second == MADE_UP
    assert len(calls) == 2


def test_peaks_beside_other_work_are_not_kept(tmp_path, monkeypatch):
    disturbed = replace(MADE_UP, own_share=0.5)
    monkeypatch.setattr(peaks, "measure_in_child", lambda *_: disturbed)

    assert read_peaks(HERE, tmp_path, sys.executable) == disturbed
    assert not disturbed.is_sound
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"torch_version": "2"}, {"threads": 2}, {"dtype": "bfloat16"}])
def test_what_they_depend_on_makes_other_peaks(change):
    assert replace(HERE, **change).file_name != HERE.file_name


def test_a_damaged_file_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(peaks, "measure_in_child", lambda *_: MADE_UP)
    (tmp_path / HERE.file_name).write_text('{"dtype": ')

    assert read_peaks(HERE, tmp_path, sys.executable) == MADE_UP
    assert json.loads((tmp_path / HERE.file_name).read_text())["gemm_flops_per_s"] == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device_kind": "mps"}, "device of kind mps"),
        ({"dtype": "int8"}, "products in int8"),
        ({"device_kind": "cuda"}, "float32 on cuda: measuring failed"),
    ],
)
def test_what_cannot_be_measured_says_why(change, words):
    if change.get("device_kind") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")

    with pytest.raises(ValueError, match=words):
        measure_in_child(replace(HERE, **change), sys.executable)


def test_asking_for_peaks_imports_no_torch():
    code = "import sys, flatout.hardware.peaks; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16", "float16"])
def test_peaks_of_a_gpu(dtype):
    found = measure_in_child(
        replace(HERE, device_kind="cuda", dtype=dtype, threads=4), sys.executable
    )

    assert found.gemm_flops_per_s > 1e11
    assert found.memory_bytes_per_s > found.copy_bytes_per_s
