"""Bytes looked up in a table: the kernel in Triton's interpreter, and compiled for a GPU."""

import sys
import types

import pytest
import torch

from flatout.kernels import lookup
from flatout.kernels.lookup import looked_up
from tests.kernels.interpreter import needs_triton, printed

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


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that is right, on the processor; what it was given."""
    seen = []

    def look_up(values, levels, out, axes):
        seen.append(values.shape)
        out.copy_(GATHERED(values, levels, axes))

    monkeypatch.setattr(lookup, "find_axes", lambda _shape, _values, _out, axis: axis)
    monkeypatch.setattr(lookup, "look_up", look_up)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(lookup, "_has_triton", lambda: True)
    monkeypatch.setattr(lookup, "_KEPT", {})
    monkeypatch.setattr(lookup, "_FAILED", set())
    return types.SimpleNamespace(seen=seen)


GATHERED = lookup._gathered


def count_gathering(monkeypatch):
    made = []
    monkeypatch.setattr(
        lookup, "_gathered", lambda *given: made.append(given[0].shape) or GATHERED(*given)
    )
    return made


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_batches_that_differ_in_size_are_made_both_ways_once(kernel, monkeypatch, order):
    by_torch = count_gathering(monkeypatch)
    back = [order.index(place) for place in range(4)]
    levels = torch.randn(3, 256)

    for sides in [(4, 3, 20, 30), (3, 3, 21, 17), (8, 3, 5, 40), (2, 3, 64, 64)]:
        values = torch.randint(0, 256, sides, dtype=torch.uint8)
        values = values.permute(order).contiguous().permute(back)
        found, wanted = looked_up(values, levels, 1), GATHERED(values, levels, 1)
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()

    assert by_torch == [(4, 3, 20, 30)]
    assert len(kernel.seen) == 4
    assert list(lookup._KEPT.values()) == [True]


def test_other_orders_gaps_types_and_tables_are_other_forms(kernel):
    values = torch.randint(0, 256, (4, 3, 6, 8), dtype=torch.uint8)

    looked_up(values, torch.randn(3, 256), 1)
    looked_up(values, torch.randn(1, 256), 1)
    looked_up(values, torch.randn(3, 256).double(), 1)
    looked_up(values.contiguous(memory_format=torch.channels_last), torch.randn(3, 256), 1)
    looked_up(values[..., 2:], torch.randn(3, 256), 1)
    looked_up(values[:1], torch.randn(3, 256), 1)

    assert len(lookup._KEPT) == 6


def test_where_triton_failed_it_is_not_tried_again(kernel, caplog, monkeypatch):
    def fail(*_):
        kernel.seen.append("failed")
        raise RuntimeError("no compiler")

    monkeypatch.setattr(lookup, "look_up", fail)
    levels = torch.randn(3, 256)

    for sides in [(2, 3, 4, 5), (2, 3, 4), (3, 7)]:
        axis = sides.index(3)
        values = torch.randint(0, 256, sides, dtype=torch.uint8)
        assert torch.equal(looked_up(values, levels, axis), GATHERED(values, levels, axis))

    assert kernel.seen == ["failed"]
    assert caplog.text.count("no compiler") == 1


def test_while_a_graph_is_captured_nothing_is_compared(kernel, monkeypatch):
    values, levels = torch.zeros(2, 3, 4, 5, dtype=torch.uint8), torch.randn(3, 256)
    monkeypatch.setattr(lookup, "_is_capturing", lambda _device: True)

    looked_up(values, levels, 1)
    assert (kernel.seen, lookup._KEPT) == ([], {})
    monkeypatch.setattr(lookup, "_is_capturing", lambda _device: False)
    looked_up(values, levels, 1)

    assert len(kernel.seen) == 1


def test_a_module_named_triton_without_a_spec_is_no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))

    assert not lookup._has_triton()


@pytest.mark.gpu
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])
@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_a_gpu_keeps_the_kernel_and_gives_the_same_bits(order, dtype):
    back = [order.index(place) for place in range(4)]
    values = torch.randint(0, 256, (8, 3, 65, 70), dtype=torch.uint8).permute(order).contiguous()
    values, levels = values.permute(back), torch.randn(3, 256).to(dtype)
    wanted = lookup._gathered(values, levels, 1)

    found = [looked_up(values.cuda(), levels.cuda(), 1) for _ in range(2)]

    assert any(lookup._KEPT.values())
    assert all(one.stride() == wanted.stride() for one in found)
    assert all(torch.equal(one.cpu(), wanted) for one in found)
