"""Larger batches: the rates follow their rule, whatever the schedule does."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.profile import PeakBytes
from flatout.records.recipe import Choice, Recipe
from flatout.techniques.batch.batch_size import BatchSize, rate_factor, rule_for, scale_rate
from flatout.workflow.recipe_files import write_recipe
from tests.support.programs import python
from tests.techniques.facts import GIB, loader, machine, model, optimizer, profile
from tests.techniques.guarded import checked, played

PROMISE = ("naive_gpt.py", {"samples": 16, "instead_of": 8})


def training(*, samples=16.0, asked=16, length=10_000, peak=GIB, **changes):
    known = {
        "samples_per_step": samples,
        "loaders": (loader(batch_size=asked, dataset_len=length),),
        "optimizers": (optimizer(),),
        "models": (model(),),
        "peak_bytes": PeakBytes(device=peak, reserved=peak),
        "phases_ms": {"optimizer": 25.0},
    }
    return profile(**known | changes)


def test_the_loader_gets_the_larger_batch():
    given = {"dataset": range(10_000), "batch_size": 16, "batch_sampler": None}

    assert BatchSize(samples=64, instead_of=16).loader(given)["batch_size"] == 64
    assert given["batch_size"] == 16


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batch_size": 8}, "batch is 8, not 16"),
        ({"batch_sampler": [[0]]}, "batch_sampler"),
        ({"dataset": range(200)}, "fewer than 8 steps"),
    ],
)
def test_other_loaders_stay_as_they_are(changes, why):
    given = {"dataset": range(10_000), "batch_size": 16, "batch_sampler": None} | changes

    with pytest.raises(NotApplicable, match=why):
        BatchSize(samples=64, instead_of=16).loader(given)


def moved(optimizer, parameter):
    """Return how far one step with a gradient of one moves the parameter."""
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return (before - parameter.detach()).item()


@pytest.mark.parametrize(("length", "factor"), [(10_000, 4.0), (100, 1.0)])
def test_rates_grow_only_where_a_loader_got_the_larger_batch(length, factor):
    """The optimizer is often made first; a loader that keeps its batch keeps its rate."""
    technique = BatchSize(samples=64, instead_of=16, learning_rate="linear", warm_up_steps=0)
    parameter = nn.Parameter(torch.zeros(()))
    found = technique.optimizer(torch.optim.SGD([parameter], lr=1.0))
    with suppress(NotApplicable):
        technique.loader({"dataset": range(length), "batch_size": 16, "batch_sampler": None})

    assert moved(found, parameter) == factor


LOSSES = {
    "sum": (lambda x: nn.functional.mse_loss(x, torch.ones(64), reduction="sum"), 1.0),
    "half a sum": (lambda x: nn.functional.mse_loss(x, torch.ones(64), reduction="sum") / 2, 1.0),
    "mean by hand": (lambda x: (x - 1).square().sum() / 64, 4.0),
    "mean": (lambda x: nn.functional.mse_loss(x, torch.ones(64)), 4.0),
}


@pytest.mark.parametrize(("loss", "factor"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_a_sum_keeps_its_rates_under_the_linear_rule(loss, factor):
    """Its gradients have grown with the batch already."""
    technique = BatchSize(samples=64, instead_of=16, learning_rate="linear", warm_up_steps=0)
    technique.loader({"dataset": range(10_000), "batch_size": 16, "batch_sampler": None})
    parameter = nn.Parameter(torch.zeros(()))
    found = technique.optimizer(torch.optim.SGD([parameter], lr=1.0))

    technique.backward(torch.autograd.backward)(loss(parameter.expand(64)))

    assert moved(found, parameter) == factor
    assert bool(technique.end()) == (factor == 1.0)


def test_an_optimizer_that_chooses_its_rate_is_left_alone():
    """As Adafactor of transformers does, whose groups have None for it."""
    stepper = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    stepper.param_groups[0]["lr"] = None

    with pytest.raises(NotApplicable, match="chooses its rate itself"):
        BatchSize(samples=64, instead_of=32, learning_rate="sqrt").optimizer(stepper)


def test_rates_grow_over_the_warm_up_inside_the_steps_only():
    parameter = nn.Parameter(torch.zeros(()))
    found = scale_rate(torch.optim.SGD([parameter], lr=1.0), 4.0, warm_up_steps=2)

    steps = [moved(found, parameter) for _ in range(4)]

    assert steps == pytest.approx([2.0, 3.0, 4.0, 4.0])
    assert found.param_groups[0]["lr"] == 1.0


def test_a_training_that_goes_on_from_a_checkpoint_goes_on_with_the_warm_up():
    parameter = nn.Parameter(torch.zeros(()))
    first = scale_rate(torch.optim.SGD([parameter], lr=1.0), 4.0, warm_up_steps=2)
    moved(first, parameter)
    again = scale_rate(torch.optim.SGD([parameter], lr=1.0), 4.0, warm_up_steps=2)

    again.load_state_dict(first.state_dict())

    assert [moved(again, parameter) for _ in range(3)] == pytest.approx([3.0, 4.0, 4.0])


def test_a_schedule_goes_on_with_its_own_rates():
    parameter = nn.Parameter(torch.zeros(()))
    found = scale_rate(torch.optim.SGD([parameter], lr=1.0), 4.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(found, 0.5)

    steps = []
    for _ in range(3):
        steps.append(moved(found, parameter))
        schedule.step()

    assert steps == pytest.approx([4.0, 2.0, 1.0])
    assert schedule.get_last_lr() == [0.125]


def test_the_state_dict_holds_the_scripts_own_rate():
    parameter = nn.Parameter(torch.zeros(()))
    technique = BatchSize(samples=64, instead_of=16, learning_rate="sqrt", warm_up_steps=0)
    technique.loader({"batch_size": 16})
    found = technique.optimizer(torch.optim.SGD([parameter], lr=0.5))

    assert moved(found, parameter) == pytest.approx(1.0)
    assert found.state_dict()["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("names", "rule", "factor"),
    [(["SGD"], "linear", 4.0), (["AdamW"], "sqrt", 2.0), (["SGD", "Adam"], "sqrt", 2.0)],
)
def test_the_rule_follows_the_optimizer(names, rule, factor):
    assert rule_for(names) == rule
    assert rate_factor(4.0, rule) == factor


def test_the_next_doubling_is_offered_with_its_rule():
    (found,) = BatchSize.candidates(training(), machine())

    assert found == BatchSize(samples=32, instead_of=16, learning_rate="sqrt")
    assert found.predict(training(), machine()).step_ms < 0


def test_after_a_doubling_was_kept_the_next_one_is_offered():
    (found,) = BatchSize.candidates(training(samples=32.0), machine())

    assert (found.samples, found.instead_of) == (64, 16)


RULES = [("SGD", "linear", 2.0), ("Adam", "sqrt", 2**0.5), ("AdamW", "sqrt", 2**0.5)]
TRAIN = """
import sys
import torch

weight = torch.nn.Linear(1, 1, bias=False)
kind = getattr(torch.optim, sys.argv[1])
options = {"weight_decay": 0.0} if sys.argv[1] == "AdamW" else {}
optimizer = kind(weight.parameters(), lr=0.01, **options)
ones = torch.utils.data.TensorDataset(torch.ones(4096, 1))
with open("steps.txt", "w") as steps:
    for (batch,) in torch.utils.data.DataLoader(ones, batch_size=16):
        before = weight.weight.item()
        optimizer.zero_grad()
        weight(batch).mean().backward()
        optimizer.step()
        rate = optimizer.param_groups[0]["lr"]
        steps.write(f"{len(batch)} {rate} {before - weight.weight.item()}\\n")
"""
"""Its gradient is always one, so that each step goes as far as its rate: SGD's and Adam's."""


def written(path, name):
    """Write the recipe of what is offered to a training with this optimizer; return its text."""
    (found,) = BatchSize.candidates(training(optimizers=(optimizer(name=name),)), machine())
    choice = Choice(technique="batch_size", settings=found.settings())
    write_recipe(Recipe(choices=(choice,)), path)
    return path.read_text()


@pytest.mark.parametrize(("name", "rule", "factor"), RULES)
def test_the_rule_and_the_warm_up_are_written_into_the_recipe(tmp_path, name, rule, factor):
    del factor

    lines = written(tmp_path / "recipe.toml", name).splitlines()

    assert {f'learning_rate = "{rule}"', "warm_up_steps = 100"} <= set(lines)
    assert {"samples = 32", "instead_of = 16"} <= set(lines)


@pytest.mark.parametrize(("name", "rule", "factor"), RULES)
def test_a_run_with_that_recipe_ramps_its_rate_to_what_the_rule_says(tmp_path, name, rule, factor):
    assert f'"{rule}"' in written(tmp_path / "recipe.toml", name)
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["run", "--with", "recipe.toml", "train.py", name]

    done = python(["-m", "flatout", *words], cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in (tmp_path / "steps.txt").read_text().splitlines()]
    ramp = [1 + (factor - 1) * min(1.0, number / 101) for number in range(1, 129)]
    assert [float(moved) for _, _, moved in steps] == pytest.approx(
        [0.01 * value for value in ramp], rel=1e-3
    )
    assert {(samples, rate) for samples, rate, _ in steps} == {("32", "0.01")}


@pytest.mark.parametrize(
    "facts",
    [
        training(length=200),
        training(peak=15 * GIB),
        training(loaders=()),
        training(asked=None),
        training(loaders=(loader(), loader(address="b:1"))),
    ],
)
def test_it_is_not_offered_where_it_cannot_be(facts):
    assert BatchSize.candidates(facts, machine()) == ()


@pytest.mark.slow
def test_a_real_script_trains_on_twice_the_samples_a_step():
    settings = {"samples": 16, "instead_of": 8, "learning_rate": "sqrt", "warm_up_steps": 5}

    trial = played("naive_gpt.py", "batch_size", **settings)

    assert [item.status for item in trial.applied] == ["applied"]
    assert trial.profile.samples_per_step == pytest.approx(16, rel=0.05)
    assert trial.profile.loaders[0].batch_size == 8


@pytest.mark.slow
def test_the_guard_sees_the_damage_of_a_rate_that_is_far_too_large():
    settings = {"samples": 48, "instead_of": 8, "learning_rate": "linear", "warm_up_steps": 0}

    check = checked("naive_gpt.py --optimizer SGD --rate 100", "batch_size", **settings)

    assert not check.passed, check
