"""Remembered shapes: the same stream as by torch's own answers, in fewer questions to it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.planner.tracing import recording
from flatout.planner.tracing.shape_cache import MISSING, ShapeCache
from flatout.planner.tracing.trace import trace
from tests.support.truth_models import MODELS

aten = torch.ops.aten


def answered(cache: ShapeCache, func, *args):
    key = cache.key(func, args, {})
    assert key is not None
    found = cache.find(key, args)
    if found is MISSING:
        found = func(*args)
        cache.keep(key, args, {}, found)
    return found


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_a_trace_is_the_same_without_what_is_remembered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = recording.ShapeCache.key
    streams = []
    for how in (key, key, lambda *_: None):
        monkeypatch.setattr(recording.ShapeCache, "key", how)
        streams.append(trace(MODELS[name], device="cpu"))
    _, remembered, asked = streams

    assert remembered.allocations == asked.allocations
    assert remembered.events == asked.events


def test_what_one_trace_found_another_one_knows() -> None:
    func = aten.mul.Tensor
    for fake in (FakeTensorMode(), FakeTensorMode()):
        with fake:
            left, right = torch.empty(3, 5), torch.empty(3, 5)
        cache = ShapeCache(fake)
        key = cache.key(func, (left, right), {})
        assert key is not None
        known = cache.find(key, (left, right))
        cache.keep(key, (left, right), {}, func(left, right))

    assert known is not MISSING
    assert known.fake_mode is fake
    assert known.shape == (3, 5)


def test_a_view_lies_in_its_argument_and_a_result_does_not() -> None:
    with FakeTensorMode() as mode:
        cache = ShapeCache(mode)
        for x in (torch.empty(4, 6), torch.empty(4, 6)):
            turned = answered(cache, aten.t.default, x)
            grown = answered(cache, aten.mul.Tensor, x, 2)

            assert turned.shape == (6, 4)
            assert turned.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert grown.untyped_storage()._cdata != x.untyped_storage()._cdata


def test_layouts_types_and_numbers_are_told_apart() -> None:
    with FakeTensorMode() as mode:
        cache = ShapeCache(mode)
        x = torch.empty(4, 6)
        keys = [
            cache.key(aten.sum.dim_IntList, (x, [0]), {}),
            cache.key(aten.sum.dim_IntList, (x, [1]), {}),
            cache.key(aten.sum.dim_IntList, (x.t(), [0]), {}),
            cache.key(aten.sum.dim_IntList, (x.half(), [0]), {}),
            cache.key(aten.sum.dim_IntList, (x, [0], 1), {}),
            cache.key(aten.sum.dim_IntList, (x, [0], True), {}),
            cache.key(aten.sum.dim_IntList, (x, [0]), {"dtype": torch.float64}),
        ]

    assert len(set(keys)) == len(keys)


def test_what_changes_its_argument_is_not_remembered() -> None:
    with FakeTensorMode() as mode:
        cache = ShapeCache(mode)
        shapes = []
        for _ in range(2):
            x = torch.empty(4, 6)
            answered(cache, aten.unsqueeze_.default, x, 0)
            shapes.append(tuple(x.shape))

    assert shapes == [(1, 4, 6), (1, 4, 6)]


def test_nothing_is_remembered_of_real_or_complex_tensors() -> None:
    with FakeTensorMode() as mode:
        cache = ShapeCache(mode)
        odd = torch.empty(3, dtype=torch.complex64)

    assert cache.key(aten.neg.default, (odd,), {}) is None
    assert cache.key(aten.neg.default, (torch.ones(3),), {}) is None
