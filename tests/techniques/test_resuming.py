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
from flatout.techniques.optimizer.adafactor import Adafactor
from flatout.techniques.optimizer.eight_bit_optimizer import EightBitOptimizer
from flatout.workflow.run import run
from tests.paths import ROOT
from tests.support.programs import workload_of
from tests.techniques.guarded import recipe_of
from tests.techniques.small_training import in_first_step

SCRIPT = ROOT / "tests/scripts/techniques/resumable.py"
HALF, WHOLE = 3, 6
NEEDS = {"eight_bit_optimizer": "torchao"}
TECHNIQUES = {
    "adafactor": (),
    "channels_last": ("--fused",),
    "eight_bit_optimizer": (),
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
    workload = workload_of(folder, SCRIPT.name, *arguments_of(technique, steps, save, resume))
    assert run(workload, recipe_of(*technique.split())) == 0
    return torch.load(folder / save, weights_only=True)


def skip_without(technique):
    if technique in NEEDS and importlib.util.find_spec(NEEDS[technique]) is None:
        pytest.skip(f"{NEEDS[technique]} is not installed")


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
    return model, in_first_step(optimizer, technique().optimizer)


def went_on(model, optimizer, steps):
    """Return copies of what would be saved after some more steps."""
    for step in steps:
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def test_new_objects_go_on_exactly_where_the_old_ones_were():
    expected = went_on(*begun(Adafactor), range(6))

    saved = went_on(*begun(Adafactor), range(3))
    found = went_on(*begun(Adafactor, saved), range(3, 6))

    assert differences(found, expected) == []


@pytest.mark.filterwarnings("ignore")  # torchao's own, of kernels for GPUs
def test_packed_moments_come_out_of_a_checkpoint_as_they_went_in():
    pytest.importorskip("torchao.optim")
    weight = nn.Parameter(torch.zeros(64, 64))
    torch.manual_seed(0)
    plain = torch.optim.AdamW([weight])
    moments = {"exp_avg": torch.randn(64, 64), "exp_avg_sq": torch.rand(64, 64)}
    plain.state[weight] = {"step": torch.tensor(1.0), **moments}
    first = EightBitOptimizer().optimizer(plain)

    second = EightBitOptimizer().optimizer(torch.optim.AdamW([weight]))
    second.load_state_dict(copy.deepcopy(first.state_dict()))

    for name in moments:
        one, other = first.state[weight][name], second.state[weight][name]
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scale, other.scale)
