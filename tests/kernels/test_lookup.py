"""Bytes looked up in a table: the kernel in Triton's interpreter, and compiled for a GPU."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flatout.kernels import lookup
from flatout.kernels.lookup import looked_up

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = Path(__file__).parents[2] / "src"
DTYPES = ("float16", "bfloat16", "float32", "float64")
FORMS = (
    "one table",
    "no channels",
    "one picture",
    "without batch",
    "a row",
    "videos",
    "frames",
    "nothing",
    "a part",
    "a part, channels last",
)
NO_INTERPRETER = "only 0-dimensional arrays can be converted to Python scalars"
"""Triton 3.6's interpreter takes numbers out of arrays with one entry, which numpy 2.4 refuses."""

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: no kernel to test"
)


@functools.cache
def printed(script, **variables):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **dict(variables)},
        capture_output=True,
        text=True,
        check=False,
    )
    if NO_INTERPRETER in done.stderr + done.stdout:
        pytest.skip("this Triton's interpreter cannot work with this numpy")
    assert done.returncode == 0, done.stderr[-3_000:]
    return json.loads(done.stdout)


def interpreted():
    return printed("interpret_lookup.py", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("order", ["channels first", "channels last", "turned"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_gives_torchs_bits_and_strides(order, dtype):
    assert interpreted()[f"{order} torch.{dtype}"] is True


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_batches_of_other_forms_are_looked_up_as_well(form):
    assert interpreted()[form] is True


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_are_cut_mirrored_and_looked_up_in_one_go(dtype):
    assert interpreted()[f"windows torch.{dtype}"] is True


@needs_triton
@pytest.mark.parametrize(
    "case", ["windows of one", "windows of bytes", "resident pictures", "resident bytes"]
)
def test_windows_of_other_forms_are_cut_as_well(case):
    assert interpreted()[case] is True


@needs_triton
def test_offsets_may_need_more_than_32_bits():
    assert interpreted()["beyond 32 bits"] is True


@needs_triton
def test_a_kernel_that_gives_other_bits_is_never_used():
    assert interpreted()["a wrong kernel is not used"] is True


@needs_triton
@pytest.mark.slow
def test_the_kernel_compiles_for_hopper_also_where_sizes_are_1():
    assert all(size > 0 for size in printed("build_lookup.py").values())


def test_on_a_processor_torch_looks_up(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kept = dict(lookup._KEPT)
    values = torch.arange(256, dtype=torch.uint8).repeat(2, 3, 1, 1)
    levels = torch.rand(3, 256)

    assert torch.equal(looked_up(values, levels, 1), levels[None, :, None].expand(2, 3, 1, 256))
    assert kept == lookup._KEPT


@pytest.mark.gpu
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])
@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_a_gpu_keeps_the_kernel_and_gives_the_same_bits(order, dtype):
    back = [order.index(place) for place in range(4)]
    values = torch.randint(0, 256, (8, 3, 65, 70), dtype=torch.uint8).permute(order).contiguous()
    values, levels = values.permute(back), torch.randn(3, 256).to(dtype)
    wanted = lookup._gathered(values, levels, 1)

    found = [looked_up(values.cuda(), levels.cuda(), 1) for _ in range(2)]

    assert any(strides is not None for strides in lookup._KEPT.values())
    assert all(one.stride() == wanted.stride() for one in found)
    assert all(torch.equal(one.cpu(), wanted) for one in found)
