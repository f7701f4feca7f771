"""Attention by hand is found, proven, and left alone where it is not.

Its spellings are those of `tests/kernels/test_sdpa_spellings.py`.
"""

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from flatout.kernels.module_proof import capture, forget_proof
from flatout.kernels.sdpa_rewrite import is_causal_mask
from flatout.records.errors import NotApplicable
from flatout.techniques.compute.sdpa_attention import SdpaAttention, use_fused_attention
from tests.scripts.techniques import naive_gpt
from tests.techniques.facts import machine, model, profile
from tests.techniques.guarded import played

PROMISE = ("naive_gpt.py", {})

LENGTH, HEADS, WIDTH = 12, 2, 16


class Attention(nn.Module):
    """The parts that the spellings below share."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.scale = (WIDTH // HEADS) ** -0.5
        self.register_buffer("seen", torch.tril(torch.ones(LENGTH, LENGTH)))

    def parts(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return tuple(y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in (q, k, v))

    def merged(self, y):
        b, _, t, _ = y.shape
        return self.out(y.transpose(1, 2).reshape(b, t, WIDTH))


class NanoGPT(Attention):
    def forward(self, x):
        q, k, v = self.parts(x)
        t = x.size(1)
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.seen[:t, :t] == 0, float("-inf"))
        return self.merged(self.drop(functional.softmax(weights, dim=-1)) @ v)


class Vit(Attention):
    def forward(self, x):
        q, k, v = self.parts(x)
        weights = (q * self.scale) @ k.transpose(-2, -1)
        return self.merged(weights.softmax(dim=-1) @ v)


class Listened(Attention):
    """Takes the softmax by a module, to which a script may listen."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Softmax(dim=-1)

    def forward(self, x):
        q, k, v = self.parts(x)
        return self.merged(self.drop(self.weights(q @ k.transpose(-2, -1))) @ v)


class OverKeys(Attention):
    def forward(self, x):
        q, k, v = self.parts(x)
        return self.merged(functional.softmax(q @ k.transpose(-2, -1), dim=-2) @ v)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, LENGTH, WIDTH),)


def built(kind):
    torch.manual_seed(0)
    return kind().train()


def gradients(module, *args):
    module.zero_grad()
    module.drop.p = 0.0
    output = module(*args)
    output.square().sum().backward()
    return [output, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("kind", [NanoGPT, Vit])
def test_it_is_replaced_and_computes_the_same(kind):
    plain, fused = built(kind), built(kind)

    outcome = use_fused_attention(fused, *inputs())

    assert outcome == {"": ""}
    pairs = zip(gradients(plain, *inputs()), gradients(fused, *inputs()), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize("kind", [NanoGPT, Vit])
def test_the_fused_operator_is_really_called(kind, monkeypatch):
    calls = []
    fused = built(kind)
    use_fused_attention(fused, *inputs())
    operation = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda *a, **k: calls.append(k) or operation(*a, **k),
    )

    fused(*inputs())

    assert len(calls) == 1
    assert calls[0]["is_causal"] == (kind is NanoGPT)
    assert calls[0]["dropout_p"] == (0.3 if kind is NanoGPT else 0.0)


@pytest.mark.parametrize("part", ["weights", "drop"])
def test_hooks_on_what_would_be_left_out_go_on_to_be_called(part):
    early, late, seen = built(Listened), built(Listened), []
    early.get_submodule(part).register_forward_hook(lambda *_: seen.append("early"))

    outcome = use_fused_attention(early, *inputs())
    assert use_fused_attention(late, *inputs()) == {"": ""}
    late.get_submodule(part).register_forward_hook(lambda *_: seen.append("late"))
    seen.clear()
    late(*inputs())

    assert "something listens" in outcome[""]
    assert seen == ["late"]


def test_a_replacement_that_computes_something_else_is_refused(monkeypatch):
    module = built(Vit)
    monkeypatch.setattr("flatout.kernels.sdpa_rewrite.attend", lambda q, k, v, *_, **__: v * 1.0001)

    outcome = use_fused_attention(module, *inputs())

    assert "differ by" in outcome[""]
    assert "forward" not in vars(module)


def test_the_memory_of_a_proof_on_a_device_is_no_peak_of_the_training(monkeypatch):
    class OnDevice:
        def parameters(self):
            return iter([SimpleNamespace(is_cuda=True, device="cuda:1")] * 2)

    done = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", done.append)

    forget_proof(nn.Linear(2, 2))
    forget_proof(OnDevice())

    assert done == ["emptied", "cuda:1"]


def test_other_lengths_and_evaluation_go_the_right_way():
    plain, fused = built(NanoGPT), built(NanoGPT)
    use_fused_attention(fused, *inputs())
    (x,) = inputs()

    plain.drop.p = fused.drop.p = 0.0

    assert torch.allclose(fused(x[:, :5]), plain(x[:, :5]), atol=1e-6)
    assert torch.equal(fused.eval()(x), plain.eval()(x))


def test_a_changed_attribute_goes_back_to_the_scripts_own_code():
    plain, fused = built(Vit), built(Vit)
    use_fused_attention(fused, *inputs())

    plain.scale = fused.scale = 2.0

    assert torch.equal(fused(*inputs()), plain(*inputs()))


def test_a_copy_attends_with_its_own_parameters():
    fused = built(NanoGPT)
    use_fused_attention(fused, *inputs())

    copied = copy.deepcopy(fused)
    with torch.no_grad():
        copied.out.weight.zero_()
        copied.out.bias.zero_()

    assert copied(*inputs()).count_nonzero() == 0
    assert fused(*inputs()).count_nonzero() > 0


def test_the_model_can_still_be_pickled():
    fused = built(NanoGPT)
    use_fused_attention(fused, *inputs())

    back = pickle.loads(pickle.dumps(fused))

    assert torch.equal(back.eval()(*inputs()), fused.eval()(*inputs()))


def test_looking_leaves_buffers_and_the_random_stream_as_they_were():
    network = naive_gpt.GPT(dropout=0.1).train()
    tokens = torch.randint(61, (2, 16))
    state, before = torch.get_rng_state(), copy.deepcopy(network.state_dict())

    outcome = use_fused_attention(network, tokens)

    assert set(outcome.values()) == {""}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())


def test_autocast_forgets_its_casts_after_a_look_that_fails_too(monkeypatch):
    """Torch 2.9 would hand them to the real call without gradients; newer ones do not."""
    cleared = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(1))
    module = built(Vit)

    capture(module, [module], lambda: module.forward(*inputs()))
    with pytest.raises(TypeError):
        capture(module, [module], module.forward)

    assert cleared == [1, 1]


def test_weights_get_their_gradients_in_autocast_after_a_look():

    def gradients_after(look):
        module = built(Vit)
        with torch.autocast("cpu", torch.bfloat16):
            look(module)
            module(*inputs()).float().square().sum().backward()
        return [p.grad for p in module.parameters()]

    found = gradients_after(lambda m: capture(m, [m], lambda: m.forward(*inputs())))
    expected = gradients_after(id)

    assert all(grad is not None for grad in found)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_only_the_causal_mask_counts_as_causal():
    seen = torch.ones(4, 4, dtype=torch.bool).tril()

    assert is_causal_mask(seen, 4, 4)
    assert is_causal_mask(torch.zeros(4, 4).masked_fill(~seen, -1e9), 4, 4)
    assert not is_causal_mask(seen.triu(-1), 4, 4)
    assert not is_causal_mask(torch.ones(4, 4, dtype=torch.bool), 4, 4)
    assert not is_causal_mask(torch.full((4, 4), 0.5).masked_fill(~seen, -1e9), 4, 4)


def test_a_model_without_a_softmax_is_left_alone():
    network = nn.Linear(2, 2)

    with pytest.raises(NotApplicable, match="softmax"):
        SdpaAttention().forward(network, network)


def test_a_model_whose_pattern_is_not_proven_says_so_at_the_end():
    technique = SdpaAttention()
    module = built(OverKeys)

    call = technique.forward(module, module)
    call(*inputs())

    with pytest.raises(NotApplicable, match="looked at 1 modules with a softmax: no softmax"):
        technique.end()


def test_it_is_offered_to_models_that_take_a_softmax():
    with_softmax = profile(models=(model(softmax_modules=2),))

    (found,) = SdpaAttention.candidates(with_softmax, machine())

    assert found.predict(with_softmax, machine()).step_ms == pytest.approx(-100 * (1 - 1 / 1.15))
    assert SdpaAttention.candidates(profile(models=(model(),)), machine()) == ()


@pytest.mark.slow
def test_a_real_script_says_how_many_modules_were_replaced():
    trial = played("naive_gpt.py --dropout 0.1", "sdpa_attention")

    (applied,) = trial.applied
    assert (applied.status, applied.why) == ("applied", "3 of 3 modules replaced")
    assert trial.profile.models[0].softmax_modules == 3
