"""Groups of tensors are updated as the tensors one by one."""

import copy

import pytest
import torch

from flatout.records.errors import NotApplicable
from flatout.records.profile import PeakBytes
from flatout.techniques.optimizer.foreach_optimizer import ForeachOptimizer, update_in_groups
from tests.techniques.facts import machine, model, optimizer, profile
from tests.techniques.small_training import network

PROMISE = ("elaborate", {})


def trained(model, made, steps=3):
    for step in range(steps):
        made.zero_grad()
        model(torch.full((4, 8), float(step))).square().sum().backward()
        made.step()
    return list(model.parameters())


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop", "NAdam", "RAdam", "Adagrad", "Adamax"])
def test_the_updates_are_the_optimizers_own(kind):
    plain = network()
    grouped = copy.deepcopy(plain)

    expected = trained(plain, getattr(torch.optim, kind)(plain.parameters(), lr=1e-3))
    found = trained(
        grouped,
        ForeachOptimizer().optimizer(getattr(torch.optim, kind)(grouped.parameters(), lr=1e-3)),
    )

    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_other_optimizers_take_a_rate_that_is_a_tensor_in_groups():
    plain = network()
    grouped = copy.deepcopy(plain)
    rate = torch.tensor(1e-3)

    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=rate))
    found = trained(
        grouped, ForeachOptimizer().optimizer(torch.optim.SGD(grouped.parameters(), lr=rate))
    )

    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_a_checkpoint_of_the_plain_one_goes_on_in_groups():
    plain = network()
    first = torch.optim.AdamW(plain.parameters())
    trained(plain, first)
    second = torch.optim.AdamW(plain.parameters())

    second.load_state_dict(first.state_dict())
    update_in_groups(second)
    trained(plain, second, steps=1)

    assert second.state[next(plain.parameters())]["step"] == 4


def test_what_was_saved_in_groups_is_no_choice_of_the_script():
    module = network()
    first = update_in_groups(torch.optim.AdamW(module.parameters()))
    trained(module, first)
    second = torch.optim.AdamW(module.parameters())
    second.load_state_dict(first.state_dict())

    ForeachOptimizer().optimizer(second)

    assert second.defaults["foreach"]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.SGD(p, lr=1, foreach=True), "chose its implementation"),
        (lambda p: torch.optim.AdamW(p, fused=True), "fused"),
        (lambda p: torch.optim.LBFGS(p), "no foreach"),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)), "rate is a tensor"),
    ],
)
def test_others_are_left_alone_with_the_reason(make, why):
    with pytest.raises(NotApplicable, match=why):
        ForeachOptimizer().optimizer(make(network().parameters()))


def test_what_a_script_switches_off_is_no_choice_against_it():
    stepper = torch.optim.SGD(network().parameters(), lr=1, foreach=False)

    ForeachOptimizer().optimizer(stepper)

    assert stepper.param_groups[0]["foreach"] is True


def test_it_is_offered_where_torch_goes_from_tensor_to_tensor():
    looped = profile(
        phases_ms={"optimizer": 20.0}, optimizers=(optimizer(has_foreach_option=True),)
    )
    on_gpu = profile(
        kind="cuda", phases_ms={"optimizer": 20.0}, optimizers=(optimizer(has_foreach_option=True),)
    )

    (found,) = ForeachOptimizer.candidates(looped, machine())

    assert found.predict(looped, machine()).step_ms == pytest.approx(-20 * (1 - 1 / 1.3))
    assert ForeachOptimizer.candidates(on_gpu, machine()) == ()
    off = optimizer(has_foreach_option=True, is_foreach=False)
    switched_off = profile(kind="cuda", phases_ms={"optimizer": 20.0}, optimizers=(off,))
    assert ForeachOptimizer.candidates(switched_off, machine())
    assert ForeachOptimizer.candidates(profile(), machine()) == ()


@pytest.mark.parametrize(("peak", "more"), [(110, 40), (160, 0)])
def test_the_copy_takes_the_room_that_the_backward_left(peak, more):
    facts = profile(
        kind="cuda",
        models=(model(parameter_bytes=50),),
        peak_bytes=PeakBytes(allocated=peak),
        phases_ms={"optimizer": 20.0},
    )

    assert ForeachOptimizer().predict(facts, machine()).peak_bytes == more
