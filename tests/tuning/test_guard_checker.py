"""The referee on real scripts: what is honest passes, what trains something else does not."""

import functools
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.records.ablation import LossCheck
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics
from flatout.tuning import guard_checker as refereeing
from flatout.tuning.guard_checker import GuardChecker
from flatout.tuning.trial_runner import TrialRunner
from tests.support.programs import workload_of
from tests.support.trial_runs import copy_scripts, machine

pytestmark = pytest.mark.slow


@functools.cache
def with_reference(target, *arguments):
    """Return a referee that has run a script's reference trials, once for all tests."""
    workload = workload_of(copy_scripts(), target, *arguments)
    out = Path(tempfile.mkdtemp(prefix="flatout-test-"))
    referee = GuardChecker(
        TrialRunner(workload=workload, machine=machine(), out=out, limit_s=200.0), lambda _: None
    )
    referee._make_reference()
    return referee


def referee_for(tmp_path, target, *arguments):
    """Return a referee that has judged nothing yet."""
    referee = with_reference(target, *arguments)
    return replace(referee, lab=replace(referee.lab, out=tmp_path), _verdicts={})


def recipe_of(name, **settings):
    return Recipe(choices=(Choice(technique=name, settings=settings),))


DIRECT = """
import torch
from torch import nn
from torch.nn import functional
torch.set_num_threads(2)
torch.manual_seed(0)
conv = nn.Conv2d(3, 4, 3, padding=1)
x, y = torch.randn(2, 3, 9, 10), torch.rand(2, 4, 9, 10)
def loss():
    out = conv(x)
    gated = torch.where(out > 0, out, functional.max_pool2d(out, 3, 1, 1))
    return (torch.sigmoid(gated) - y).square().mean()
eager = torch.autograd.grad(loss(), list(conv.parameters()))
compiled = torch.autograd.grad(torch.compile(loss)(), list(conv.parameters()))
print(max(((a - b).norm() / b.norm()).item() for a, b in zip(compiled, eager)))
"""
"""Prints how far compiled gradients are off, found without any part of flatout."""


def compiled_gradients_are_right():
    command = [sys.executable, "-c", DIRECT]
    return float(subprocess.check_output(command, text=True)) < 0.01


def test_compile_is_rejected_exactly_where_its_gradients_are_wrong(tmp_path):
    referee = referee_for(tmp_path, "gate.py")

    check = referee.check(recipe_of("torch_compile"))

    assert check.passed == compiled_gradients_are_right(), check.why
    assert check.status in ("rejected", "within", "same")


def test_workers_train_bit_for_bit_the_same(tmp_path):
    referee = referee_for(tmp_path, "plain_loop.py")

    check = referee.check(recipe_of("loader_workers", num_workers=2))

    assert check.status == "same", check.why
    assert referee.aa_check.status == "same"


def test_bf16_stays_within_its_promise(tmp_path):
    referee = referee_for(tmp_path, "plain_loop.py")

    check = referee.check(recipe_of("bf16_autocast"))

    assert check.status == "within", check.why


def test_a_ceiling_is_lifted_where_one_rounding_explains_the_distance(tmp_path):
    referee = referee_for(tmp_path, "amplifier.py")

    check = referee.check(recipe_of("bf16_autocast"))

    assert check.status == "within", check.why
    assert "one rounding of its inputs and weights" in check.why
    assert (tmp_path / "guard" / "rounded").exists()


def test_a_script_that_loses_its_digits_is_not_trained_in_bf16(tmp_path):
    referee = referee_for(tmp_path, "amplifier.py", "lose")

    check = referee.check(recipe_of("bf16_autocast"))

    assert check.status == "rejected"


def test_script_that_fails_in_the_guard_trial_is_not_compared(tmp_path):
    referee = referee_for(tmp_path, "endings.py", "crash")

    check = referee.check(recipe_of("fused_optimizer"))

    assert check.status == "not_compared"
    assert not check.passed


def test_other_threads_are_judged_as_rounding(tmp_path):
    referee = referee_for(tmp_path, "plain_loop.py")

    check = referee.check(recipe_of("cpu_threads", threads=1))

    assert check.passed, check.why


def test_script_that_runs_in_bf16_itself_is_calibrated_in_full_precision(tmp_path):
    referee = referee_for(tmp_path, "grad_scaler.py")

    check = referee.check(recipe_of("fused_optimizer"))

    assert check.passed, check.why


def test_functional_dropout_is_seen_to_act_under_a_recipe(tmp_path):
    referee = referee_for(tmp_path, "functional_dropout.py")

    check = referee.check(recipe_of("fused_optimizer"))

    assert check.passed, check.why
    looked = sorted(path.name for path in (tmp_path / "guard").glob("activity-*"))
    assert len(looked) == 2
    assert looked[0] == "activity-baseline"
    assert looked[1].startswith("activity-candidate-")


def test_script_without_dropout_is_spared_the_second_look(tmp_path):
    referee = referee_for(tmp_path, "plain_loop.py")

    referee.check(recipe_of("fused_optimizer"))

    looked = sorted(path.name for path in (tmp_path / "guard").glob("activity-*"))
    assert looked == ["activity-baseline"]


def test_recipe_under_which_dropout_is_gone_is_rejected(tmp_path, monkeypatch):
    referee = referee_for(tmp_path, "functional_dropout.py")
    measured = iter([{"0": 0.3}, {"0": 0.0}])
    monkeypatch.setattr(GuardChecker, "_measure_activity", lambda *_: next(measured))

    check = referee.check(recipe_of("fused_optimizer"))

    assert check.status == "rejected"
    assert "dropout no longer acts" in check.why


@pytest.mark.parametrize(
    "measured", [[None], [{"0": None}], [{"0": 0.3}, None], [{"0": 0.3}, {"0": None}]]
)
def test_a_recipe_whose_dropout_could_not_be_looked_at_is_not_kept(tmp_path, monkeypatch, measured):
    referee = referee_for(tmp_path, "functional_dropout.py")
    answers = iter(measured)
    monkeypatch.setattr(GuardChecker, "_measure_activity", lambda *_: next(answers))

    check = referee._look_at_activity(
        recipe_of("fused_optimizer"), "candidate", LossCheck(status="same")
    )

    assert check.status == "not_compared"
    assert "dropout acts" in check.why


def test_a_rank_that_left_no_record_is_never_passed_over(tmp_path, monkeypatch):
    """The baseline ran in two processes, and its repeat recorded only one of them."""
    monkeypatch.setattr(refereeing, "judge", lambda _: LossCheck(status="same"))
    referee = referee_for(tmp_path, "plain_loop.py")
    referee._calibration = ()
    record = object()

    def judged(repeat):
        referee._baseline, referee._repeat = (record, record), repeat
        return referee._judged(Numerics.EXACT, recipe_of("pinned_memory"), (record, record))

    assert judged((record, record)).status == "same"
    assert judged((record,)).status == "not_compared"
