"""Adapters are trained, weights stay, and the script's own optimizer does it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.profile import PeakBytes
from flatout.techniques.model.lora import Lora, add_adapters, train_only
from tests.techniques.facts import GIB, machine, model, optimizer, profile
from tests.techniques.guarded import played

PROMISE = ("naive_gpt.py", {"rank": 4})

peft = pytest.importorskip("peft")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4))


def test_the_output_is_the_same_before_the_first_step():
    plain, adapted = network(), network()
    add_adapters(adapted, rank=2)

    assert torch.equal(plain(torch.ones(2, 8)), adapted(torch.ones(2, 8)))


def test_only_adapters_move():
    adapted = network()
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=0.1)
    new = add_adapters(adapted, rank=2)
    frozen = {k: v.clone() for k, v in adapted.state_dict().items() if "lora" not in k}
    train_only(optimizer, new)

    for _ in range(3):
        optimizer.zero_grad()
        adapted(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()

    after = adapted.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in frozen.items())
    assert all(after[name].abs().sum() > 0 for name in after if "lora_B" in name)
    assert not any("lora" in name for name in after if name.startswith("3."))


def test_the_optimizers_groups_and_their_schedule_stay():
    adapted = network()
    biases = [m.bias for m in adapted if isinstance(m, nn.Linear)]
    weights = [m.weight for m in adapted if isinstance(m, nn.Linear)]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    technique = Lora(rank=2)
    technique.model(adapted)
    technique.optimizer(optimizer)
    adapted(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    schedule.step()

    assert len(optimizer.param_groups) == 2
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {
        id(p) for p in adapted.parameters() if p.requires_grad
    }


def test_a_state_from_before_the_adapters_is_loaded_and_they_begin_again():
    """As for the next fold: nothing of what the last one trained may be left."""
    adapted = network()
    before, expected = copy.deepcopy(adapted.state_dict()), adapted(torch.ones(2, 8))
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=0.1)
    train_only(optimizer, add_adapters(adapted, rank=2))
    adapted(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    own = copy.deepcopy(adapted.state_dict())
    trained = adapted(torch.ones(2, 8))

    adapted.load_state_dict(before)
    again = adapted(torch.ones(2, 8))
    adapted.load_state_dict(own)

    assert torch.equal(again, expected)
    assert torch.equal(adapted(torch.ones(2, 8)), trained)
    assert not torch.equal(trained, expected)


def adapters_of(layer):
    return {id(p) for p in layer.parameters() if p.requires_grad}


def held_by(group):
    return {id(p) for p in group["params"]}


def test_each_adapter_goes_into_the_group_of_its_layers_weight():
    adapted = network()
    optimizer = torch.optim.AdamW(
        [
            {"params": adapted[0].parameters(), "lr": 1e-5},
            {"params": adapted[2].parameters(), "lr": 1e-3},
            {"params": adapted[3].parameters()},
        ]
    )

    train_only(optimizer, add_adapters(adapted, rank=2))

    assert [held_by(group) for group in optimizer.param_groups] == [
        adapters_of(adapted[0]),
        adapters_of(adapted[2]),
        set(),
    ]


def test_of_two_optimizers_each_trains_the_adapters_of_its_own_layers():
    adapted = network()
    body = torch.optim.AdamW(adapted[0].parameters(), lr=1e-5)
    rest = torch.optim.AdamW([*adapted[2].parameters(), *adapted[3].parameters()], lr=1e-3)
    technique = Lora(rank=2)
    technique.model(adapted)

    technique.optimizer(body)
    technique.optimizer(rest)

    assert held_by(body.param_groups[0]) == adapters_of(adapted[0])
    assert held_by(rest.param_groups[0]) == adapters_of(adapted[2])


def test_an_optimizer_of_the_last_layer_alone_gets_no_adapters():
    technique = Lora(rank=2)
    adapted = network()
    head = torch.optim.AdamW(adapted[3].parameters())
    technique.model(adapted)

    with pytest.raises(NotApplicable, match="holds no weight of a layer with adapters"):
        technique.optimizer(head)

    assert held_by(head.param_groups[0]) == {id(p) for p in adapted[3].parameters()}


def test_layers_that_share_a_weight_have_their_adapters_once_in_its_group():
    adapted = network()
    adapted.append(nn.Linear(4, 4))
    adapted[2].weight = nn.Parameter(torch.ones(16, 16))
    adapted.insert(3, nn.Linear(16, 16))
    adapted[3].weight = adapted[2].weight
    optimizer = torch.optim.AdamW(adapted.parameters())

    train_only(optimizer, add_adapters(adapted, rank=2))

    (group,) = optimizer.param_groups
    assert len(group["params"]) == len(held_by(group))
    assert held_by(group) == {id(p) for p in adapted.parameters() if p.requires_grad}


def test_an_optimizer_that_is_built_later_has_each_adapter_once():
    """A second phase, with an optimizer of its own."""
    technique, adapted = Lora(rank=2), network()
    technique.model(adapted)
    later = torch.optim.AdamW(
        [{"params": adapted[0].parameters()}, {"params": adapted[2:].parameters(), "lr": 1e-5}]
    )

    technique.optimizer(later)

    assert [len(group["params"]) for group in later.param_groups] == [2, 2]
    assert [held_by(group) for group in later.param_groups] == [
        adapters_of(adapted[0]),
        adapters_of(adapted[2]),
    ]


def test_a_model_that_the_script_lets_go_is_not_kept():
    """One of each fold."""
    technique, adapted = Lora(rank=2), network()
    technique.model(adapted)
    alive = [weakref.ref(parameter) for parameter in adapted.parameters()]

    del adapted
    gc.collect()

    assert [each() for each in alive] == [None] * len(alive)


def test_evaluation_computes_with_the_adapters(monkeypatch):
    """Without gradients torch's encoder hands its weights to one kernel."""
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    adapted = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 4))
    add_adapters(adapted, rank=2)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    x = torch.randn(2, 3, 8)
    expected = adapted(x)

    with torch.no_grad():
        found = adapted.eval()(x)

    torch.testing.assert_close(found, expected)


def test_layers_that_the_script_froze_get_no_adapters():
    adapted = network()
    adapted[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(p for p in adapted.parameters() if p.requires_grad)

    train_only(optimizer, add_adapters(adapted, rank=2))

    assert not hasattr(adapted[0], "lora_A")
    assert held_by(optimizer.param_groups[0]) == adapters_of(adapted[2])


def test_an_optimizer_of_another_model_is_left_alone():
    technique, adapted = Lora(), network()
    technique.model(adapted)

    with pytest.raises(NotApplicable, match="holds no weight"):
        technique.optimizer(torch.optim.AdamW(network().parameters()))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(2, 2)), "no linear layers"),
        (lambda: _adapted(), "put adapters into the model itself"),
        (lambda: network().requires_grad_(requires_grad=False), "no linear layers"),
    ],
)
def test_models_that_cannot_be_adapted_stay_as_they_are(make, why):
    found = make()
    before = copy.deepcopy(found.state_dict())

    with pytest.raises(NotApplicable, match=why):
        add_adapters(found)

    assert list(found.state_dict()) == list(before)


def _adapted():
    found = network()
    add_adapters(found)
    return found


def test_it_is_offered_to_large_models_of_blocks():
    large = profile(models=(model(parameters=50_000_000, repeated_blocks=12),))

    (found,) = Lora.candidates(large, machine())

    assert found.predict(large, machine()).step_ms == pytest.approx(-30.0)
    assert Lora.candidates(profile(models=(model(repeated_blocks=12),)), machine()) == ()


@pytest.mark.parametrize(("kind", "peak_bytes"), [("cpu", 60_000_000), ("cuda", -40_000_000)])
def test_on_a_cpu_what_its_import_takes_counts_against_the_states_that_go(kind, peak_bytes):
    facts = profile(
        kind=kind,
        models=(model(parameter_bytes=20_000_000),),
        optimizers=(optimizer(),),
        peak_bytes=PeakBytes(allocated=GIB),
    )

    assert Lora().predict(facts, machine()).peak_bytes == peak_bytes


@pytest.mark.slow
def test_a_script_with_a_grad_scaler_trains_adapters():
    """It looks in the first step for gradients of what the optimizer holds then."""
    trial = played("roomy_gpt.py --scaler", "lora", rank=4)

    assert [item.status for item in trial.applied] == ["applied"], trial.applied
    assert trial.outcome.value == "ok", trial.message
