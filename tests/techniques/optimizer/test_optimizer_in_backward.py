import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from flatout.agent import training_device
from flatout.agent.session import Session
from flatout.records.errors import NotApplicable
from flatout.records.profile import PeakBytes
from flatout.records.trial_spec import TrialSpec
from flatout.techniques.optimizer.optimizer_in_backward import OptimizerInBackward
from flatout.techniques.optimizer.optimizer_in_backward.updates_in_backward import (
    GradientWatch,
    find_obstacle,
    step_in_backward,
)
from tests.paths import ROOT
from tests.support.programs import python
from tests.techniques.facts import FULL, GIB, gpu, machine, model, optimizer, profile
from tests.techniques.guarded import checked, played

KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


class Tied(nn.Module):
    """Uses one weight at both ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner = nn.Embedding(11, 16), nn.Linear(16, 16)

    def forward(self, tokens):
        return torch.tanh(self.inner(self.table(tokens))) @ self.table.weight.T


def test_the_hooks_do_not_keep_a_model_that_the_script_lets_go():
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    step_in_backward(optimizer)
    alive = weakref.ref(optimizer), weakref.ref(model)

    del model, optimizer
    gc.collect()

    assert [each() for each in alive] == [None, None]


def batches(steps):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(11, (8, 5), generator=generator) for _ in range(steps)]


def train(module, stepper, steps=5, begin=lambda: None):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.9)
    for tokens in batches(steps):
        loss = nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())
        stepper.zero_grad()
        loss.backward()
        begin()
        begin = int
        stepper.step()
        scheduler.step()
    return list(module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_bit_identical_with_schedules_and_tied_weights(kind):
    plain = Tied()
    changed = copy.deepcopy(plain)
    stepper = KINDS[kind](changed.parameters())

    found = train(changed, stepper, begin=lambda: step_in_backward(stepper))

    expected = train(plain, KINDS[kind](plain.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_no_gradient_is_left_after_backward():
    module = Tied()
    stepper = KINDS["AdamW"](module.parameters())
    step_in_backward(stepper)

    module(batches(1)[0]).sum().backward()

    assert [p.grad for p in module.parameters()] == [None] * 3


def test_the_state_goes_into_the_plain_optimizer_and_back():
    module, other = Tied(), Tied()
    stepper, plain = KINDS["AdamW"](module.parameters()), KINDS["AdamW"](other.parameters())
    train(module, stepper, begin=lambda: step_in_backward(stepper))
    other.load_state_dict(module.state_dict())

    plain.load_state_dict(stepper.state_dict())
    stepper.load_state_dict(copy.deepcopy(plain.state_dict()))

    found, expected = train(module, stepper, steps=3), train(other, plain, steps=3)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_it_is_undone():
    module = Tied()
    stepper = KINDS["AdamW"](module.parameters())

    step_in_backward(stepper)()
    module(batches(1)[0]).sum().backward()

    assert all(p.grad is not None for p in module.parameters())


def test_gradients_that_add_up_later_end_the_training_with_the_reason():
    module = Tied()
    stepper = KINDS["SGD"](module.parameters())
    step_in_backward(stepper)
    module(batches(1)[0]).sum().backward()

    with pytest.raises(RuntimeError, match="take the technique out of the recipe"):
        module(batches(1)[0]).sum().backward()


PEAKS = """
import torch
from torch import nn
from flatout.techniques.optimizer.optimizer_in_backward.updates_in_backward import step_in_backward
from tests.techniques.peaks import peak_bytes

def build():
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
    return module, torch.optim.SGD(module.parameters(), lr=0.1)

def step(module, stepper):
    def run():
        module(torch.ones(1, 256)).sum().backward()
        stepper.step()
        stepper.zero_grad()
    return run

(module, stepper), (plain, other) = build(), build()
step_in_backward(stepper)
step(module, stepper)()
print(peak_bytes(step(plain, other)), peak_bytes(step(module, stepper)))
"""
"""In a process of its own: the profiler sees what every thread of a process allocates."""


def test_gradients_are_not_all_held_at_once():
    done = python(["-c", PEAKS], check=True, cwd=ROOT)

    before, after = map(int, done.stdout.split())
    assert after < before / 4


def watched(spoil, *, rounds=1):
    """Return what stands against it after a first step in which `spoil` was done."""
    technique = OptimizerInBackward()
    module = nn.Linear(4, 4)
    stepper = torch.optim.AdamW(module.parameters())
    found = []

    def ask(optimizer, _args, _kwargs):
        try:
            technique.optimizer(optimizer)
        except NotApplicable as reason:
            found.append(str(reason))

    technique.start()
    stepper.register_step_pre_hook(ask)
    for _ in range(rounds):
        module(torch.ones(2, 4)).sum().backward()
    spoil(module)
    stepper.step()
    return found


def test_an_ordinary_step_has_nothing_against_it():
    assert watched(lambda module: module.zero_grad() if module.bias.is_sparse else None) == []


@pytest.mark.parametrize(
    ("spoil", "rounds", "reason"),
    [
        (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0), 1, "clipped"),
        (lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0), 1, "clipped"),
        (lambda m: m.weight.grad.norm(), 1, "read between backward and step, in .*in_backward"),
        (lambda m: None, 2, "several backwards"),
        (lambda m: m.zero_grad(), 1, "no gradients when it begins"),
    ],
)
def test_what_needs_the_gradients_in_between_is_seen_in_the_first_step(spoil, rounds, reason):
    (found,) = watched(spoil, rounds=rounds)

    assert pytest.importorskip("re").search(reason, found)


def test_next_to_another_optimizer_it_is_refused(monkeypatch):
    session = Session(TrialSpec(mode="run"))
    monkeypatch.setattr(training_device, "_followed", [weakref.ref(session)])
    others = torch.optim.SGD(nn.Linear(2, 4).parameters(), lr=0.1)
    session.add_optimizer(others)

    (found,) = watched(lambda module: None)

    assert "another optimizer" in found


def watched_with_session(monkeypatch, between):
    """Return what stands against it where `between` is done before the first step."""
    session = Session(TrialSpec(mode="run"))
    monkeypatch.setattr(training_device, "_followed", [weakref.ref(session)])
    technique, module = OptimizerInBackward(), nn.Linear(4, 4)
    technique.start()
    stepper = torch.optim.AdamW(module.parameters(), lr=0.1)
    session.add_optimizer(stepper)
    schedule = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.5)
    module(torch.ones(2, 4)).sum().backward()

    between(stepper, schedule)

    try:
        technique.optimizer(stepper)
    except NotApplicable as reason:
        return str(reason)
    return ""


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda stepper, _: stepper.param_groups[0].update(lr=0.01), "rates are set between"),
        (lambda stepper, _: stepper.param_groups[0].update(betas=(0.8, 0.9)), "rates are set"),
        (lambda _, schedule: schedule.step(), "rates are set between"),
        (lambda stepper, _: stepper.param_groups[0].update(foreach=True), ""),
        (lambda stepper, _: stepper.param_groups[0].update(tokens=8), ""),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step... before")
def test_rates_that_are_set_between_backward_and_step_are_seen(between, reason, monkeypatch):
    found = watched_with_session(monkeypatch, between)

    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_rates_that_are_set_there_from_the_second_step_on_end_the_training_with_the_reason():
    module = Tied()
    stepper = KINDS["SGD"](module.parameters())
    step_in_backward(stepper)
    module(batches(1)[0]).sum().backward()

    stepper.param_groups[0]["lr"] = 0.5

    with pytest.raises(RuntimeError, match="sets its rate between backward and step"):
        stepper.step()


def test_what_a_script_notes_in_a_group_by_a_name_of_its_own_is_no_rate():
    module = Tied()
    stepper = KINDS["SGD"](module.parameters())
    stepper.param_groups[0]["tokens"] = 0
    step_in_backward(stepper)
    for x in batches(2):
        stepper.zero_grad()
        module(x).sum().backward()
        stepper.param_groups[0]["tokens"] += len(x)

        stepper.step()

    assert stepper.param_groups[0]["tokens"] > 0


def test_watching_leaves_nothing_behind():
    watch, backward = GradientWatch(), torch.autograd.backward
    watch.begin()

    watch.end()

    assert torch.autograd.backward is backward
    assert "grad" not in vars(nn.Parameter)


def test_optimizers_that_are_not_torchs_own_are_left_alone():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    found = find_obstacle(Own(nn.Linear(2, 2).parameters(), lr=0.1), GradientWatch())

    assert "its step is not torch's own" in found


def test_parameters_on_several_devices_are_left_alone():
    """Backward runs in a thread for each device, and both would step at once."""
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])

    found = find_obstacle(torch.optim.SGD(layers.parameters(), lr=0.1), GradientWatch())

    assert "several devices" in found


@pytest.mark.slow
def test_the_guard_finds_every_gradient_and_update_bit_identical_in_a_real_script():
    check = checked("roomy_gpt.py", "optimizer_in_backward")

    assert check.passed
    assert set(check.worst.values()) == {0.0}
    assert {"gradient", "update", "loss"} <= set(check.worst)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--clip", "clipped"),
        ("--accumulate", "several backwards"),
        ("--scaler", "GradScaler"),
        ("--look", "read between backward and step, in __main__"),
        ("--closure", "runs backward itself"),
    ],
)
def test_a_real_script_that_needs_its_gradients_is_refused_with_the_reason(option, reason):
    trial = played(f"roomy_gpt.py {option}", "optimizer_in_backward")

    (applied,) = trial.not_applied
    assert trial.outcome.value == "ok"
    assert applied.status == "not_applicable"
    assert reason in applied.why


def test_it_is_offered_for_one_optimizer_and_one_backward_where_memory_is_tight():
    host = machine(device=gpu())

    def facts(**changes):
        known = {"peak_bytes": FULL, "optimizers": (optimizer(),)}
        return profile(kind="cuda", models=(model(parameter_bytes=10 * GIB),), **known | changes)

    (found,) = OptimizerInBackward.candidates(facts(), host)

    assert found.predict(facts(), host).peak_bytes == -9 * GIB
    assert OptimizerInBackward.candidates(facts(backwards_per_step=4.0), host) == ()
    assert OptimizerInBackward.candidates(facts(peak_bytes=PeakBytes()), host) == ()
    two = (optimizer(), optimizer())
    assert OptimizerInBackward.candidates(facts(optimizers=two), host) == ()
