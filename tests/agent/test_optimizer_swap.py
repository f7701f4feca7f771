"""One optimizer takes another's place, and whoever comes next is told."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatout.agent.optimizer_swap import find_obstacle, find_successor
from flatout.records.errors import NotApplicable
from flatout.techniques.optimizer.adafactor import to_adafactor
from flatout.techniques.optimizer.foreach_optimizer import ForeachOptimizer


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


def test_what_unscales_by_itself_is_not_changed(stepper):
    stepper._step_supports_amp_scaling = True

    assert "its steps are fused" in find_obstacle(stepper)


def test_groups_are_the_successors_matter(stepper):
    in_the_step(stepper, lambda optimizer: ForeachOptimizer().optimizer(optimizer))

    assert stepper.param_groups[0]["foreach"]
