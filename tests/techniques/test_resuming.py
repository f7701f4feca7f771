"""A training that is stopped and started again under its recipe is the one that ran through.

Scripts load their checkpoint before the first step: there the techniques act on an optimizer
that has a state already."""

import copy
import importlib.util
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from flatout.agent.hooks import optimizer as loaded_parts
from flatout.records.errors import NotApplicable
from flatout.records.trial import Workload
from flatout.techniques.optimizer.adafactor import Adafactor
from flatout.techniques.optimizer.eight_bit_optimizer import EightBitOptimizer
from flatout.techniques.optimizer.four_bit_optimizer import FourBitOptimizer
from flatout.techniques.optimizer.muon import STATE_KEY, Muon
from flatout.workflow.run import run
from tests.paths import ROOT
from tests.techniques.guarded import recipe_of
from tests.techniques.optimizer.test_adafactor import in_first_step

SCRIPT = ROOT / "tests/scripts/techniques/resumable.py"
HALF, WHOLE = 3, 6
NEEDS = {"eight_bit_optimizer": "torchao", "four_bit_optimizer": "torchao"}
TECHNIQUES = {
    "adafactor": (),
    "channels_last": ("--fused",),
    "eight_bit_optimizer": (),
    "four_bit_optimizer": (),
    "muon": (),
    "muon pure_bf16": (),
    "pure_bf16": (),
}
"""What changes weights or the optimizer's states, with what the script is told beside it."""
IN_ADAM = sorted(TECHNIQUES.keys() - {"adafactor"})
"""Techniques whose pages promise that Adam loads what they wrote."""


@pytest.fixture
def folder(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    return tmp_path


def arguments_of(technique, steps, save, resume):
    again = ("--resume", resume) if resume else ()
    return ("--steps", str(steps), "--save", save, *again, *TECHNIQUES[technique])


def trained(folder, technique, steps, save, resume=""):
    """Return what the script saved after a training under the technique."""
    workload = Workload(
        target=SCRIPT.name,
        arguments=arguments_of(technique, steps, save, resume),
        folder=folder,
        python=sys.executable,
    )
    assert run(workload, recipe_of(*technique.split())) == 0
    return torch.load(folder / save, weights_only=True)


def skip_without(technique):
    if technique in NEEDS and importlib.util.find_spec(NEEDS[technique]) is None:
        pytest.skip(f"{NEEDS[technique]} is not installed")
    if "muon" in technique and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch without Muon")


def differences(found, expected):
    """Return where two checkpoints differ, in anything but how far torch's random numbers are."""
    ours, theirs = (_pytree.tree_flatten_with_path(one)[0] for one in (found, expected))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    return [
        _pytree.keystr(path)
        for (path, one), (_, other) in zip(ours, theirs, strict=True)
        if not (torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other)
        and "random" not in _pytree.keystr(path)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_it_goes_on_exactly_where_it_was(technique, folder, capfd):
    skip_without(technique)

    expected = trained(folder, technique, WHOLE, "whole.pt")
    trained(folder, technique, HALF, "half.pt")
    found = trained(folder, technique, WHOLE, "again.pt", resume="half.pt")

    assert "was not applied" not in capfd.readouterr().err
    assert differences(found, expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("technique", IN_ADAM)
def test_the_plain_script_goes_on_from_it(technique, folder):
    skip_without(technique)
    trained(folder, technique, HALF, "half.pt")

    arguments = arguments_of(technique, WHOLE, "plain.pt", "half.pt")
    subprocess.run([sys.executable, SCRIPT.name, *arguments], cwd=folder, check=True, timeout=120)

    weights = torch.load(folder / "plain.pt", weights_only=True)["model"]
    assert {w.dtype for w in weights.values() if w.is_floating_point()} == {torch.float32}
    assert all(w.isfinite().all() for w in weights.values())


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4))


def begun(technique, saved=None):
    """Return a model and its optimizer, which has the state and is about to meet the technique."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loaded_parts.keep(optimizer)  # the hook point does, when an optimizer is built
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    if technique is Muon:
        technique().model(model)
    return model, in_first_step(optimizer, technique().optimizer)


def went_on(model, optimizer, steps):
    """Return copies of what would be saved after some more steps."""
    for step in steps:
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


# Torchao's own warnings, of kernels for GPUs.
of_torchao = pytest.mark.filterwarnings("ignore")
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch without Muon")
IN_PROCESS = [Adafactor, pytest.param(Muon, marks=needs_muon)]


@pytest.mark.parametrize("technique", IN_PROCESS)
def test_new_objects_go_on_exactly_where_the_old_ones_were(technique):
    expected = went_on(*begun(technique), range(6))

    saved = went_on(*begun(technique), range(3))
    found = went_on(*begun(technique, saved), range(3, 6))

    assert differences(found, expected) == []


@needs_muon
def test_adams_own_state_is_not_taken_for_one_that_muon_shared():
    plain = network()
    of_adam = went_on(plain, torch.optim.AdamW(plain.parameters()), range(3))
    without_part = went_on(*begun(Muon), range(3))
    del without_part[1][STATE_KEY]

    for saved in (of_adam, without_part):
        _, optimizer = begun(Muon, saved)
        with pytest.raises(NotApplicable, match="was loaded already"):
            Muon().optimizer(optimizer)


@of_torchao
@pytest.mark.parametrize("technique", [EightBitOptimizer, FourBitOptimizer])
def test_packed_moments_come_out_of_a_checkpoint_as_they_went_in(technique):
    pytest.importorskip("torchao.optim")
    weight = nn.Parameter(torch.zeros(64, 64))
    torch.manual_seed(0)
    plain = torch.optim.AdamW([weight])
    moments = {"exp_avg": torch.randn(64, 64), "exp_avg_sq": torch.rand(64, 64)}
    plain.state[weight] = {"step": torch.tensor(1.0), **moments}
    first = technique().optimizer(plain)

    second = technique().optimizer(torch.optim.AdamW([weight]))
    second.load_state_dict(copy.deepcopy(first.state_dict()))

    for name in moments:
        one, other = first.state[weight][name], second.state[weight][name]
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scale, other.scale)


@of_torchao
def test_moments_of_eight_bits_go_on_in_four():
    pytest.importorskip("torchao.optim")
    weight = nn.Parameter(torch.zeros(64, 64))
    plain = torch.optim.AdamW([weight])
    moment = torch.full((64, 64), 0.5)
    plain.state[weight] = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment}
    eight = EightBitOptimizer().optimizer(plain)
    four = FourBitOptimizer().optimizer(torch.optim.AdamW([weight]))

    four.load_state_dict(copy.deepcopy(eight.state_dict()))

    packed = four.state[weight]["exp_avg"]
    assert packed.codes.numel() == weight.numel() // 2
    assert torch.equal(packed.dequantize(), moment)
