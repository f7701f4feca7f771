"""The steps themselves are tried with parameters on the CPU: then they must be bit-identical."""

import copy

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.profile import PeakBytes
from flatout.techniques.optimizer.offloaded_optimizer import OffloadedOptimizer, step_on_host
from flatout.techniques.optimizer.offloaded_optimizer.host_steps import HostSteps, find_obstacle
from tests.techniques.facts import FULL, GIB, gpu, machine, model, optimizer, profile
from tests.techniques.small_training import in_first_step, network, train

PROMISE = "acts on a CUDA device only: memory of a device"

KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def assert_equal(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_on_the_host_are_the_optimizer_s_own_from_the_first_on(kind):
    plain, changed = network(), network()
    stepper = in_first_step(KINDS[kind](changed.parameters()), step_on_host)
    reference = KINDS[kind](plain.parameters())
    halving = torch.optim.lr_scheduler.ExponentialLR
    scheduler, other = halving(stepper, 0.5), halving(reference, 0.5)

    found = train(changed, stepper, scheduler=scheduler)

    assert_equal(found, train(plain, reference, scheduler=other))
    own = [p for group in stepper.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(own, changed.parameters(), strict=True))
    assert set(stepper.state) == set(changed.parameters())


def test_the_step_really_runs_on_other_tensors():
    changed, seen = network(), []
    stepper = torch.optim.AdamW(changed.parameters())
    HostSteps(stepper)
    stepper.register_step_pre_hook(lambda s, *_: seen.extend(s.param_groups[0]["params"]))

    train(changed, stepper, steps=1)

    assert len(seen) == 4
    assert not set(map(id, seen)) & set(map(id, changed.parameters()))


def test_its_state_goes_into_a_plain_optimizer_and_back():
    plain, changed = network(), network()
    stepper = step_on_host(torch.optim.AdamW(changed.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(changed, stepper)
    train(plain, reference)

    assert str(stepper.state_dict()) == str(reference.state_dict())
    stepper.load_state_dict(copy.deepcopy(reference.state_dict()))

    assert_equal(train(changed, stepper), train(plain, reference))


def test_what_the_script_does_to_parameters_between_steps_counts():
    plain, changed = network(), network()
    stepper = step_on_host(torch.optim.SGD(changed.parameters(), lr=1e-2))
    reference = torch.optim.SGD(plain.parameters(), lr=1e-2)

    for module, each in ((changed, stepper), (plain, reference)):
        train(module, each, steps=2)
        with torch.no_grad():
            module[0].weight.clamp_(-0.1, 0.1)
        module[2].bias.requires_grad_(requires_grad=False).grad = None
        train(module, each, steps=2)

    assert_equal(changed.parameters(), plain.parameters())


def test_writes_that_torch_does_not_count_are_not_undone():
    plain, changed = network(), network()
    stepper = step_on_host(torch.optim.SGD(changed.parameters(), lr=1e-2))
    reference = torch.optim.SGD(plain.parameters(), lr=1e-2)

    for module, each in ((changed, stepper), (plain, reference)):
        train(module, each, steps=2)
        module[0].weight.data.clamp_(-0.01, 0.01)
        train(module, each, steps=2)

    assert_equal(changed.parameters(), plain.parameters())


def test_parameters_without_a_gradient_do_not_travel():
    changed = network()
    stepper = torch.optim.SGD(changed.parameters(), lr=1e-2)
    host_steps, frozen = HostSteps(stepper), changed[0].weight.requires_grad_(requires_grad=False)
    before = frozen.clone()

    train(changed, stepper, steps=2)

    assert host_steps.hosts[frozen].grad is None
    assert torch.equal(frozen, before)


def test_a_closure_computes_its_loss_with_the_script_s_own_parameters():
    plain, changed = network(), network()
    results = []
    for module, change in ((plain, lambda s: s), (changed, step_on_host)):
        stepper = change(torch.optim.SGD(module.parameters(), lr=1e-2))

        def closure(module=module, stepper=stepper):
            stepper.zero_grad()
            loss = module(torch.ones(2, 8)).square().mean()
            loss.backward()
            return loss

        results.append([stepper.step(closure).item() for _ in range(3)])

    assert results[0] == results[1]
    assert_equal(changed.parameters(), plain.parameters())


def test_parameters_on_the_cpu_are_left_alone():
    with pytest.raises(NotApplicable, match="host's memory already"):
        OffloadedOptimizer().optimizer(torch.optim.AdamW(network().parameters()))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda p: torch.optim.LBFGS(p), "not known to treat parameters one by one"),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), "a tensor of the script's"),
    ],
)
def test_an_optimizer_that_needs_more_is_left_alone(build, reason):
    assert reason in find_obstacle(build(nn.Linear(2, 2).parameters()))


def test_it_is_offered_where_a_gpu_is_full_and_the_host_has_room():
    def facts(**changes):
        known = {"kind": "cuda", "peak_bytes": FULL, "optimizers": (optimizer(name="AdamW"),)}
        return profile(**known | {"models": (model(parameter_bytes=GIB),)} | changes)

    host = machine(device=gpu())
    (found,) = OffloadedOptimizer.candidates(facts(), host)

    assert found.predict(facts(), host).peak_bytes == -2 * GIB
    assert found.predict(facts(), host).step_ms > 0
    too_large = facts(models=(model(parameter_bytes=10 * GIB),))
    assert OffloadedOptimizer.candidates(too_large, host) == ()
    assert OffloadedOptimizer.candidates(facts(peak_bytes=PeakBytes()), host) == ()
    assert OffloadedOptimizer.candidates(facts(kind="cpu"), host) == ()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_on_a_gpu_trains_as_with_the_plain_optimizer_and_the_state_lies_on_the_host(kind):
    plain, changed = network().cuda(), network().cuda()
    stepper = in_first_step(KINDS[kind](changed.parameters()), step_on_host)
    reference = KINDS[kind](plain.parameters())
    x = torch.randn(5, 32, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    for module, own in ((plain, reference), (changed, stepper)):
        for batch in x:
            own.zero_grad()
            module(batch).square().mean().backward()
            own.step()

    # The host's operators round differently.
    torch.testing.assert_close(
        list(changed.parameters()), list(plain.parameters()), rtol=1e-3, atol=1e-5
    )
    kept = [value for state in stepper.state.values() for value in state.values()]
    assert {value.device.type for value in kept if torch.is_tensor(value)} == {"cpu"}
    assert all(p.is_cuda for p in changed.parameters())
