"""Copies to a GPU do not wait for it, and hold what the tensor held at the call."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.profile import Regime, Spread
from flatout.records.technique import RunningTraining
from flatout.techniques.compute import async_copies
from flatout.techniques.compute.async_copies import AsyncCopies, install
from tests.techniques.facts import gpu, loader, machine, profile

PROMISE = "acts on a CUDA device only: its copies are compared in a test for a GPU"
HOPPER = machine(device=gpu())


@pytest.fixture
def calls(monkeypatch):
    """Torch's methods on a host without a GPU: what they are called with, and give back."""
    found = []

    def method(name):
        def call(self, *args, **kwargs):
            found.append((name, self, args, kwargs))
            return self

        return call

    for name in ("to", "cuda"):
        monkeypatch.setattr(torch.Tensor, name, method(name))
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, *, pin_memory: empty(x))
    return found


@pytest.fixture
def copied():
    count = []
    undo = install(count)
    yield count
    for take_back in undo:
        take_back()


COPIES = {
    "a name": lambda x: x.to("cuda"),
    "a device": lambda x: x.to(torch.device("cuda:0")),
    "a keyword": lambda x: x.to(device="cuda:0"),
    "blocking": lambda x: x.to("cuda", non_blocking=False),
    "cuda": lambda x: x.cuda(),
    "cuda of a number": lambda x: x.cuda(0),
    "cuda of a name": lambda x: x.cuda(device="cuda:0"),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_copy_is_of_memory_of_its_own_and_does_not_wait(calls, copied, copy):
    x = torch.arange(6.0).view(2, 3).t()

    copy(x)

    ((_, staged, args, kwargs),) = calls
    assert staged.data_ptr() != x.data_ptr()
    assert torch.equal(staged, x)
    assert staged.stride() == x.stride()
    assert args[0].type == "cuda"
    assert kwargs == {"non_blocking": True}
    assert copied == [1]


OTHERS = {
    "asked for": lambda x: x.to("cuda", non_blocking=True),
    "cuda asked for": lambda x: x.cuda(non_blocking=True),
    "another type": lambda x: x.to("cuda", torch.float64),
    "only a type": lambda x: x.to(torch.float64),
    "the host": lambda x: x.to("cpu"),
    "like another": lambda x: x.to(torch.ones(1)),
    "a copy": lambda x: x.to("cuda", copy=True),
    "channels last": lambda x: x[None, None].cuda(memory_format=torch.channels_last),
    "gradients": lambda x: x.requires_grad_().to("cuda"),
    "a parameter": lambda x: nn.Parameter(x, requires_grad=False).to("cuda"),
    "nothing": lambda x: x[:0].to("cuda"),
    "sparse": lambda x: x.to_sparse().to("cuda"),
}


@pytest.mark.parametrize("copy", OTHERS.values(), ids=OTHERS)
def test_every_other_call_is_torchs_own(calls, copied, copy):
    x = torch.ones(2, 3)

    copy(x)

    ((_, given, _, kwargs),) = calls
    assert kwargs.get("non_blocking") in (None, True)
    assert given.layout == torch.sparse_coo or given.untyped_storage().data_ptr() in (
        x.untyped_storage().data_ptr(),
        0,
    )
    assert copied == []


def test_large_tensors_stay_pageable(calls, copied, monkeypatch):
    monkeypatch.setattr(async_copies, "MOST_BYTES", 23)

    torch.ones(6).to("cuda")

    assert copied == []


def test_torchs_methods_come_back():
    before = torch.Tensor.to, torch.Tensor.cuda
    technique = AsyncCopies()

    technique.start()
    assert torch.Tensor.to is not before[0]
    with pytest.raises(NotApplicable, match="no tensor of the host was copied"):
        technique.end()

    assert (torch.Tensor.to, torch.Tensor.cuda) == before


def test_a_model_on_the_host_has_nothing_to_switch():
    training = RunningTraining(roots=[nn.Linear(2, 2)], optimizers=[])

    with pytest.raises(NotApplicable, match="on no GPU"):
        AsyncCopies().switch(training)


def seen(launch, h2d=0.1, **changes):
    regime = Regime(name="gemm", shares={"launch": launch, "gemm": 0.9})
    given = {"regime": regime, "loaders": (loader(pin_memory=False),)} | changes
    return profile(kind="cuda", phases_ms={"h2d": h2d}, **given)


def test_it_is_offered_where_a_gpu_waits_after_copies():
    (found,) = AsyncCopies.candidates(seen(0.04), HOPPER)

    assert found.predict(seen(0.04), HOPPER).step_ms == pytest.approx(-0.1 - 4.0, rel=0.01)
    assert found.predict(seen(0.0), HOPPER).step_ms == pytest.approx(-0.1 - 4.0, rel=0.01)
    short = replace(seen(0.0), step_ms=Spread(median=5.0, p10=5.0, p90=5.0, n=20))
    assert found.predict(short, HOPPER).step_ms == pytest.approx(-0.1 - 0.5)
    assert found.predict(seen(0.2), HOPPER).step_ms == pytest.approx(-0.1 - 10.0, rel=0.01)
    assert AsyncCopies.candidates(seen(0.04, h2d=0.0), HOPPER) == ()
    pinned = seen(0.04, loaders=(loader(pin_memory=True),))
    assert AsyncCopies.candidates(pinned, HOPPER) == ()
    assert AsyncCopies.candidates(replace(seen(0.04), device_kind="cpu"), HOPPER) == ()
    assert AsyncCopies.candidates(seen(0.0, h2d=5.0, regime=None), HOPPER)


@pytest.mark.gpu
def test_on_a_gpu_what_is_changed_at_once_was_copied_before(copied):
    busy = torch.randn(4096, 4096, device="cuda")
    source = torch.zeros(1 << 20)
    for number in range(20):
        for _ in range(8):
            busy = (busy @ busy).clamp_(-1, 1)
        source.fill_(number)
        there = source.to("cuda")
        source.fill_(-1)

        assert (there == number).all()
    assert copied == [20]
