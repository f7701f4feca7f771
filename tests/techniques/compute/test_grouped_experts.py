"""Loops over experts in several spellings are found, proven, and left alone where they are not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from flatout.kernels import expert_mixture, module_proof
from flatout.kernels.expert_mixture import grouped_linear
from flatout.records.errors import NotApplicable
from flatout.techniques.compute.grouped_experts import GroupedExperts, group_experts
from tests.scripts.techniques.mixture import Mixture, Model
from tests.techniques.facts import machine, model, profile
from tests.techniques.guarded import checked, played

PROMISE = "this module asks the guard"

WIDTH = 32


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.w2 = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Mixtral(nn.Module):
    """As transformers had it: every expert runs, also on no tokens; logits are returned."""

    def __init__(self, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = 8, top_k
        self.gate = nn.Linear(WIDTH, 8, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(8))

    def chosen(self, logits):
        weights = functional.softmax(logits, dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def forward(self, hidden):
        x = hidden.view(-1, hidden.shape[-1])
        logits = self.gate(x)
        weights, chosen = self.chosen(logits)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        masks = functional.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for number in range(self.num_experts):
            place, rows = torch.where(masks[number])
            made = self.experts[number](x[rows]) * weights[rows, place, None]
            out.index_add_(0, rows, made.to(x.dtype))
        return out.view(hidden.shape), logits


class Switch(Mixtral):
    def chosen(self, logits):
        weights, chosen = logits.topk(1, dim=-1)
        return weights.softmax(dim=-1) * 1.0, chosen


class Single(Mixtral):
    """Each expert is one layer."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))


class Sigmoid(Mixtral):
    def chosen(self, logits):
        return logits.sigmoid().topk(self.top_k, dim=-1)


class Capped(Mixtral):
    """Tokens beyond an expert's capacity are dropped."""

    def chosen(self, logits):
        weights, chosen = super().chosen(logits)
        ranks = functional.one_hot(chosen, 8).flatten(0, 1).cumsum(0).view(*chosen.shape, 8)
        rank = ranks.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        return weights * (rank <= 40), chosen


class Noisy(Mixtral):
    def chosen(self, logits):
        return super().chosen(logits + torch.randn_like(logits))


class Keeping(Mixtral):
    def chosen(self, logits):
        self.balance = logits.mean()
        return super().chosen(logits)


class Attending(Mixtral):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(8)
        )


def built(kind):
    torch.manual_seed(0)
    return kind().train()


def tokens():
    return torch.randn(2, 48, WIDTH, generator=torch.Generator().manual_seed(1))


def results(module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    output = module(x)
    output = output[0] if isinstance(output, tuple) else output
    output.square().sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    return output.detach(), x.grad, grads


@pytest.mark.parametrize("kind", [Mixture, Mixtral, Switch, Sigmoid, Single])
def test_each_spelling_is_replaced_and_computes_the_same(kind):
    plain, changed = built(kind), built(kind)

    assert group_experts(changed, tokens()) == {"": ""}

    for x in (tokens() * 3, tokens()[:1, :5], tokens()[:, :1].expand(2, 48, WIDTH).contiguous()):
        output, slope, grads = results(changed, x)
        expected, expected_slope, expected_grads = results(plain, x)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(slope, expected_slope, rtol=1e-4, atol=1e-4)
        assert {k for k, g in grads.items() if g is None} == {
            k for k, g in expected_grads.items() if g is None
        }
        for name, grad in expected_grads.items():
            if grad is not None:
                torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-3)


def test_an_expert_s_layers_are_multiplied_once_for_all_its_tokens(monkeypatch):
    changed, calls = built(Mixture), []
    group_experts(changed, tokens())
    monkeypatch.setattr(
        "flatout.kernels.expert_mixture.grouped_linear",
        lambda *args: calls.append(args[3]) or grouped_linear(*args),
    )

    changed(tokens())

    assert [sum(counts) for counts in calls] == [2 * 96, 2 * 96]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Capped, "differ"),
        (Noisy, "not known"),
        (Keeping, "keeps something"),
        (Attending, "holds a LayerNorm"),
    ],
)
def test_other_mixtures_are_left_alone_with_the_reason(kind, why):
    module = built(kind)

    outcome = group_experts(module, tokens())

    assert why in outcome[""]
    assert "forward" not in vars(module)


def test_a_copy_uses_its_own_weights_and_evaluation_the_script_s_own_code():
    plain, changed = built(Mixture), built(Mixture)
    group_experts(changed, tokens())
    copied = copy.deepcopy(changed)

    with torch.no_grad():
        for parameter in copied.experts.parameters():
            parameter.zero_()

    assert copied(tokens()).count_nonzero() == 0
    assert torch.equal(changed.eval()(tokens()), plain.eval()(tokens()))
    assert list(changed.state_dict()) == list(plain.state_dict())


def test_looking_leaves_the_random_stream_and_the_weights_as_they_were():
    network = Model()
    state, before = torch.get_rng_state(), copy.deepcopy(network.state_dict())

    outcome = group_experts(network, torch.randint(64, (2, 16)))

    assert outcome == {"blocks.0": "", "blocks.1": ""}
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randint(64, (2, 16))  # the only thing that was drawn
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())


def test_the_memory_of_a_proof_is_given_back_whatever_comes_of_it(monkeypatch):
    network, forgotten = Model(), []
    network.blocks[1].register_buffer("seen", torch.zeros(1))
    monkeypatch.setattr(module_proof, "forget_proof", forgotten.append)

    outcome = group_experts(network, torch.randint(64, (2, 16)))

    assert outcome == {"blocks.0": "", "blocks.1": "it keeps a buffer, which its loop may change"}
    assert forgotten == [*network.blocks]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 8)])
def test_padded_and_grouped_products_give_what_single_ones_give(counts, has_bias):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 16, generator=generator)
    weights = [torch.randn(24, 16, generator=generator) for _ in counts]
    biases = [torch.randn(24, generator=generator) for _ in counts] if has_bias else None

    given = x, weights, biases, counts, torch.tensor(counts)

    expected = grouped_linear(*given)

    for by in (expert_mixture._padded, expert_mixture._by_kernel):
        torch.testing.assert_close(by(*given), expected)


@pytest.mark.parametrize("kind", [Mixture, Mixtral])
def test_rows_are_counted_once_for_a_mixture_where_they_lie(kind, monkeypatch):
    changed, calls = built(kind), []
    group_experts(changed, tokens())
    monkeypatch.setattr(
        "flatout.kernels.expert_mixture.grouped_linear",
        lambda *args: calls.append(args) or grouped_linear(*args),
    )
    alike = tokens()[:, :1].expand(2, 48, WIDTH).contiguous()

    for x in (tokens(), alike):
        changed(x)

    assert all(sizes.tolist() == list(counts) for *_, counts, sizes in calls)
    assert len({id(sizes) for *_, sizes in calls}) == 2


@pytest.mark.parametrize("by", [expert_mixture._padded, expert_mixture._by_kernel])
def test_products_ask_the_device_for_nothing_and_send_it_nothing(by, monkeypatch):
    """On a device without numbers whoever asks for one fails."""
    counts = (3, 0, 5)
    x, sizes = torch.ones(8, 16, device="meta"), torch.tensor(counts, device="meta")
    weights = [torch.ones(24, 16, device="meta") for _ in counts]
    biases = [torch.ones(24, device="meta") for _ in counts]
    monkeypatch.setattr(torch, "tensor", None)
    monkeypatch.setattr(torch, "_grouped_mm", lambda x, w, offs: x @ w[0])

    assert by(x, weights, biases, counts, sizes).shape == (8, 24)


def test_a_model_without_experts_is_left_alone():
    network = nn.Linear(2, 2)

    with pytest.raises(NotApplicable, match="router over a list"):
        GroupedExperts().forward(network, network)


def test_a_mixture_that_is_not_proven_says_so_at_the_end():
    technique = GroupedExperts()
    module = built(Noisy)

    technique.forward(module, module)(tokens())

    with pytest.raises(NotApplicable, match="looked at 1 mixtures of experts: it chooses"):
        technique.end()


def test_it_is_offered_to_models_whose_experts_matter():
    def of(**facts):
        return profile(models=(model(parameters=1000, **facts),))

    heavy = of(experts=8, expert_parameters=800)
    (found,) = GroupedExperts.candidates(heavy, machine())

    assert found.predict(heavy, machine()).step_ms == pytest.approx(-80 * (1 - 1 / 1.3))
    for light in (of(), of(experts=2, expert_parameters=800), of(experts=8, expert_parameters=9)):
        assert GroupedExperts.candidates(light, machine()) == ()


@pytest.mark.slow
def test_the_guard_finds_a_real_training_within_rounding():
    check, trial = (ask("mixture.py", "grouped_experts") for ask in (checked, played))

    assert check.status == "within", check
    (applied,) = trial.applied
    assert (applied.status, applied.why) == ("applied", "2 of 2 mixtures in groups")
