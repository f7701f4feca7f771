import copy

import pytest
import torch

from flatout.records.errors import NotApplicable
from flatout.techniques.optimizer.adafactor import (
    USUAL_SIZE,
    Adafactor,
    mean_size,
    to_adafactor,
)
from tests.techniques.facts import FULL, GIB, gpu, machine, model, optimizer, profile
from tests.techniques.small_training import in_first_step, network, stepped, train

PROMISE = ("roomy_gpt.py", {})


def test_it_trains_as_torchs_own_adafactor_from_the_first_step():
    plain, changed = network(), network()
    stepper = in_first_step(
        torch.optim.AdamW(changed.parameters(), lr=1e-2, weight_decay=0.0),
        lambda found: to_adafactor(found, keeps_step_length=False),
    )

    found = train(changed, stepper)

    expected = train(plain, torch.optim.Adafactor(plain.parameters(), lr=1e-2))
    assert type(stepper) is torch.optim.Adafactor
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_it_can_be_changed_by_hand_before_the_first_step():
    plain, changed = network(), network()
    stepper = torch.optim.AdamW(changed.parameters(), lr=1e-2, weight_decay=0.0)

    found = train(changed, to_adafactor(stepper, keeps_step_length=False))

    expected = train(plain, torch.optim.Adafactor(plain.parameters(), lr=1e-2))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_schedulers_go_on_to_set_the_rate():
    plain, changed = network(), network()
    reference = torch.optim.Adafactor(plain.parameters(), lr=1e-2)
    stepper = torch.optim.AdamW(changed.parameters(), lr=1e-2, weight_decay=0.0)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(s, 0.5) for s in (reference, stepper)]
    in_first_step(stepper, lambda found: to_adafactor(found, keeps_step_length=False))

    found = train(changed, stepper, scheduler=schedulers[1])

    expected = train(plain, reference, scheduler=schedulers[0])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert stepper.param_groups[0]["lr"] == pytest.approx(1e-2 / 32)


def test_steps_keep_about_the_length_of_adams_and_the_rate_stays_the_scripts():
    plain, changed = network(), network()
    before = [p.detach().clone() for p in plain.parameters()]
    stepper = torch.optim.Adam(changed.parameters(), lr=1e-3)
    in_first_step(stepper, Adafactor().optimizer)

    found = train(changed, stepper, steps=1)
    expected = train(plain, torch.optim.Adam(plain.parameters(), lr=1e-3), steps=1)

    def moved(values):
        return torch.cat([(v - b).flatten() for v, b in zip(values, before, strict=True)]).norm()

    assert 0.3 < moved(found) / moved(expected) < 3
    assert stepper.param_groups[0]["lr"] == 1e-3


def steps_of_ones(values, kind, steps, **options):
    """Return a parameter after steps in one direction, and its optimizer."""
    parameter = torch.nn.Parameter(values.clone())
    stepper = torch.optim.AdamW([parameter], **options)
    if kind is Adafactor:
        in_first_step(stepper, Adafactor().optimizer)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        stepper.step()
    return parameter.detach(), stepper


def test_what_starts_at_zero_does_not_run_away():
    """Biases in a group of their own; a rate relative to nothing would be as large as can be."""
    zero = torch.zeros(8)

    found, _ = steps_of_ones(zero, Adafactor, steps=200, lr=1e-3, weight_decay=0.0)
    expected, _ = steps_of_ones(zero, torch.optim.AdamW, steps=200, lr=1e-3, weight_decay=0.0)

    assert 0 < found.norm() / expected.norm() < 3


def test_weight_decay_is_that_of_the_scripts_rate():
    weights = torch.full((4, 4), 0.02)

    def decayed(kind):
        with_it, stepper = steps_of_ones(weights, kind, steps=1, lr=1e-3, weight_decay=0.1)
        without, _ = steps_of_ones(weights, kind, steps=1, lr=1e-3, weight_decay=0.0)
        assert stepper.param_groups[0]["weight_decay"] == 0.1
        return (without - with_it).sum().item()

    assert decayed(Adafactor) == pytest.approx(decayed(torch.optim.AdamW), rel=0.05)


def test_its_state_goes_into_a_plain_adafactor():
    module = network()
    stepper = in_first_step(torch.optim.AdamW(module.parameters()), to_adafactor)
    train(module, stepper)
    plain = torch.optim.Adafactor(module.parameters())

    plain.load_state_dict(copy.deepcopy(stepper.state_dict()))

    assert len(train(module, plain)) == 4


def test_it_keeps_a_row_and_a_column_of_each_matrix():
    module = network()
    stepper = in_first_step(torch.optim.AdamW(module.parameters()), to_adafactor)
    train(module, stepper, steps=1)

    state = stepper.state[module[0].weight]

    assert sum(value.numel() for name, value in state.items() if name != "step") == 16 + 8


def test_the_size_of_a_group_is_that_of_its_matrices():
    parameters = [torch.full((2, 2), 3.0), torch.full((4,), 100.0)]

    assert mean_size(parameters) == pytest.approx(3.0)
    assert mean_size([torch.zeros(2, 2)]) == USUAL_SIZE


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: torch.optim.SGD(network().parameters(), lr=0.1), "this is torch.optim.sgd.SGD"),
        (lambda: torch.optim.AdamW(network().parameters(), fused=True), "fused"),
        (lambda: torch.optim.AdamW(network().parameters(), amsgrad=True), "amsgrad"),
        (lambda: torch.optim.AdamW(network().parameters(), maximize=True), "maximises"),
        (lambda: torch.optim.Adam([torch.ones(2, dtype=torch.complex64)]), "complex"),
        (stepped, "made a step"),
    ],
)
def test_an_optimizer_that_cannot_change_is_left_as_it_is(build, reason):
    stepper = build()
    kind = type(stepper)

    with pytest.raises(NotApplicable, match=reason):
        Adafactor().optimizer(stepper)

    assert type(stepper) is kind


def test_it_is_offered_for_adam_where_memory_is_tight():
    host = machine(device=gpu())

    def facts(name):
        return profile(
            kind="cuda",
            peak_bytes=FULL,
            models=(model(parameter_bytes=10 * GIB),),
            optimizers=(optimizer(name=name),),
        )

    (found,) = Adafactor.candidates(facts("AdamW"), host)

    assert found.predict(facts("AdamW"), host).peak_bytes == -19 * GIB
    assert Adafactor.candidates(facts("SGD"), host) == ()
