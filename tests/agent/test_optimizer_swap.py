"""One optimizer takes another's place, and whoever comes next is told."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatout.agent import patching
from flatout.agent.optimizer_swap import find_obstacle, find_successor
from flatout.records.errors import NotApplicable
from flatout.techniques.batch.batch_size import scale_rate
from flatout.techniques.optimizer.adafactor import to_adafactor
from flatout.techniques.optimizer.foreach_optimizer import ForeachOptimizer
from tests.techniques.small_training import in_first_step


@pytest.fixture
def stepper():
    module = nn.Linear(4, 4)
    made = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    return made


def in_the_step(stepper, ask):
    """Return what was answered in a step in which another optimizer took this one's place."""
    answers = []

    def change(optimizer, _args, _kwargs):
        to_adafactor(optimizer)
        answers.append(ask(optimizer))

    handle = register_optimizer_step_pre_hook(change)
    try:
        stepper.step()
    finally:
        handle.remove()
    return answers[0]


def refusal(act, optimizer):
    with pytest.raises(NotApplicable) as reason:
        act(optimizer)
    return str(reason.value)


def test_until_the_end_of_the_step_the_class_is_the_old_one_and_the_successor_is_known(stepper):
    seen = in_the_step(stepper, lambda found: (type(found), find_successor(found)))

    assert seen == (torch.optim.AdamW, torch.optim.Adafactor)
    assert type(stepper) is torch.optim.Adafactor


def test_a_second_one_cannot_take_the_same_place(stepper):
    assert "it takes the place of Adam and AdamW, this is" in in_the_step(stepper, find_obstacle)


@pytest.mark.parametrize("is_larger_batch_first", [False, True])
def test_two_that_set_the_rate_of_a_step_leave_the_script_its_own(stepper, is_larger_batch_first):
    def larger_batch(optimizer):
        return scale_rate(optimizer, 4.0)

    changes = (
        [larger_batch, to_adafactor] if is_larger_batch_first else [to_adafactor, larger_batch]
    )
    in_first_step(stepper, lambda found: [change(found) for change in changes])
    inside, step = [], torch.optim.Adafactor._init_group

    def noted(optimizer, group, *args):
        inside.append(group["lr"] * group["weight_decay"])
        return step(optimizer, group, *args)

    rates = []
    with patching.swapped(torch.optim.Adafactor, "_init_group", noted):
        for _ in range(4):
            stepper.step()
            rates.append((stepper.param_groups[0]["lr"], stepper.param_groups[0]["weight_decay"]))

    assert rates == [(1e-3, 1e-2)] * 4
    assert inside[1:] == pytest.approx([4e-5] * 3)


def test_what_unscales_by_itself_is_not_changed(stepper):
    stepper._step_supports_amp_scaling = True

    assert "its steps are fused" in find_obstacle(stepper)


def test_groups_are_the_successors_matter(stepper):
    in_the_step(stepper, lambda optimizer: ForeachOptimizer().optimizer(optimizer))

    assert stepper.param_groups[0]["foreach"]
