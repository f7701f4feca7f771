"""Muon takes the hidden matrices, Adam keeps the rest, the script keeps its optimizer."""

import copy

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.technique import Numerics
from flatout.techniques.optimizer.adafactor import Adafactor
from flatout.techniques.optimizer.fused_optimizer import FusedOptimizer
from flatout.techniques.optimizer.muon import Muon, hidden_matrices, step_with_muon
from tests.techniques.facts import machine, model, optimizer, profile
from tests.techniques.guarded import checked, played

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch without Muon")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.outer(self.inner(self.tokens(x)).relu()))


def network():
    torch.manual_seed(0)
    return Tied()


def train(model, *optimizers, steps=3):
    for step in range(steps):
        for one in optimizers:
            one.zero_grad()
        tokens = (torch.arange(6) + step)[None] % 11
        nn.functional.cross_entropy(model(tokens)[0], tokens[0]).backward()
        for one in optimizers:
            one.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_hidden_matrices_are_linear_layers_without_embeddings_and_the_last():
    model = network()

    found = {id(weight) for weight in hidden_matrices(model)}

    assert found == {id(model.inner.weight), id(model.outer.weight)}


def test_the_updates_are_those_of_two_optimizers_by_hand():
    by_hand, together = network(), network()
    hidden = hidden_matrices(by_hand)
    rest = [p for p in by_hand.parameters() if all(p is not h for h in hidden)]
    settings = {"lr": 0.01, "weight_decay": 0.1}

    expected = train(
        by_hand,
        torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **settings),
        torch.optim.AdamW(rest, **settings),
    )
    one = torch.optim.AdamW(together.parameters(), **settings)
    found = train(together, step_with_muon(one, hidden_matrices(together)))

    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(one.param_groups[0]["params"]) == len(list(together.parameters()))


def test_a_schedule_leads_muon_too():
    model = network()
    one = step_with_muon(torch.optim.AdamW(model.parameters(), lr=0.1), hidden_matrices(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.0 if step else 1.0)
    train(model, one, steps=1)
    schedule.step()

    before = model.inner.weight.detach().clone()
    train(model, one, steps=1)

    assert torch.equal(model.inner.weight, before)


def test_a_closure_trains_with_fresh_gradients():
    plain, closed = network(), network()
    first = step_with_muon(torch.optim.AdamW(plain.parameters()), hidden_matrices(plain))
    second = step_with_muon(torch.optim.AdamW(closed.parameters()), hidden_matrices(closed))
    expected = train(plain, first)

    for step in range(3):

        def closure(step=step):
            second.zero_grad()
            tokens = (torch.arange(6) + step)[None] % 11
            loss = nn.functional.cross_entropy(closed(tokens)[0], tokens[0])
            loss.backward()
            return loss

        second.step(closure)

    assert all(torch.equal(expected[name], p) for name, p in closed.named_parameters())


@pytest.mark.parametrize("unscales", [True, False])
def test_a_scaler_that_leaves_its_work_to_a_fused_adam_leaves_it_to_muon_too(unscales):
    plain, fused = network(), network()

    def train_scaled(model, one):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            one.zero_grad()
            tokens = (torch.arange(6) + step)[None] % 11
            loss = nn.functional.cross_entropy(model(tokens)[0], tokens[0])
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            if unscales:
                scaler.unscale_(one)
            scaler.step(one)
            scaler.update()
        return list(model.parameters())

    one = torch.optim.AdamW(fused.parameters(), fused=True)
    found = train_scaled(fused, step_with_muon(one, hidden_matrices(fused)))

    two = torch.optim.AdamW(plain.parameters())
    expected = train_scaled(plain, step_with_muon(two, hidden_matrices(plain)))
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [(Muon, FusedOptimizer), (FusedOptimizer, Muon)])
def test_the_rest_may_be_fused_by_a_technique_before_or_after(order):
    plain, fused = network(), network()
    one, two = (torch.optim.AdamW(model.parameters()) for model in (fused, plain))
    Muon().model(fused)
    Muon().model(plain)

    for technique in order:
        technique().optimizer(one)
    found = train(fused, one)

    expected = train(plain, Muon().optimizer(two))
    assert one.param_groups[0]["fused"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [(Muon, Adafactor), (Adafactor, Muon)])
def test_two_techniques_that_put_other_optimizers_in_one_s_place_are_never_both_applied(order):
    model = network()
    one = torch.optim.AdamW(model.parameters())
    Muon().model(model)
    first, second = order
    first().optimizer(one)

    with pytest.raises(NotApplicable):
        second().optimizer(one)

    assert all(value.isfinite().all() for value in train(model, one).values())


def test_a_checkpoint_goes_on_where_it_was():
    model = network()
    one = step_with_muon(torch.optim.AdamW(model.parameters()), hidden_matrices(model))
    train(model, one)
    saved, weights = copy.deepcopy(one.state_dict()), copy.deepcopy(model.state_dict())
    expected = train(model, one)

    resumed = network()
    resumed.load_state_dict(weights)
    two = step_with_muon(torch.optim.AdamW(resumed.parameters()), hidden_matrices(resumed))
    two.load_state_dict(saved)

    assert all(torch.equal(expected[name], value) for name, value in train(resumed, two).items())


def test_a_plain_adam_loads_the_checkpoint():
    model = network()
    one = step_with_muon(torch.optim.AdamW(model.parameters()), hidden_matrices(model))
    train(model, one)

    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(one.state_dict())
    train(model, plain, steps=1)

    assert plain.state[model.tokens.weight]["step"] == 4
    assert plain.state[model.inner.weight]["step"] == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "no Adam's but SGD's"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximises"),
        (lambda _: torch.optim.AdamW([nn.Parameter(torch.zeros(2, 2))]), "no hidden matrices"),
    ],
)
def test_others_are_left_alone_with_the_reason(make, why):
    model = network()
    Muon().model(model)

    with pytest.raises(NotApplicable, match=why):
        Muon().optimizer(make(model.parameters()))


def test_it_promises_other_training_and_no_faster_step():
    facts = profile(models=(model(repeated_blocks=4),), optimizers=(optimizer(),))

    (found,) = Muon.candidates(facts, machine())

    assert found.numerics is Numerics.TRAINING
    assert found.predict(facts, machine()).step_ms > 0
    assert Muon.candidates(profile(models=(model(),)), machine()) == ()


@pytest.mark.slow
def test_a_real_script_is_trained_by_it():
    trial = played("naive_gpt.py --schedule --clip 1", "muon")

    assert [item.status for item in trial.applied] == ["applied"], trial.applied
    # How many steps there are is a matter of time: no single one of them decides.
    first, *others = trial.profile.losses
    assert sum(others) / len(others) < first


@pytest.mark.slow
def test_the_guard_passes_it_as_done_on_purpose():
    assert checked("naive_gpt.py", "muon").status == "on_purpose"
