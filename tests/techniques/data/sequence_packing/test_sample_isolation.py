import random

import numpy as np
import pytest
import torch
from torch import nn

from flatout.data.padding import first_fit
from flatout.techniques.data.sequence_packing.sample_isolation import (
    LENGTHS,
    WIDTH,
    keeps_apart,
    untouched,
)

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 64}
KEEPING = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_head": 4, "n_layer": 2},
    "gpt_neox": SMALL | {"intermediate_size": 64},
    "mixtral": GROUPED | {"num_local_experts": 4},
}
MIXING = {
    "opt": SMALL | {"ffn_dim": 64},
    "falcon": SMALL,
    "lfm2": GROUPED | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    "roberta": SMALL | {"intermediate_size": 64, "is_decoder": True},
}


def causal_model(kind, settings, attention="sdpa"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return made.train()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KEEPING)
def test_models_that_hand_their_positions_to_the_mask_keep_samples_apart(kind, attention):
    assert keeps_apart(causal_model(kind, KEEPING[kind], attention))


@pytest.mark.parametrize("kind", KEEPING)
def test_so_they_do_in_half_precision(kind):
    assert keeps_apart(causal_model(kind, KEEPING[kind]).bfloat16())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MIXING)
def test_models_that_mix_the_samples_of_a_row_are_found_out(kind, attention):
    assert not keeps_apart(causal_model(kind, MIXING[kind], attention))


@pytest.mark.parametrize("kind", MIXING)
def test_so_they_are_in_half_precision(kind):
    assert not keeps_apart(causal_model(kind, MIXING[kind]).bfloat16())


def test_what_keeps_samples_apart_in_a_single_row_alone_is_found_out():
    model = causal_model("llama", KEEPING["llama"])

    def drop_positions(_, args, kwargs):
        kwargs = dict(kwargs)
        if len(kwargs["input_ids"]) > 1:  # as flash attention of transformers 5.23 does
            kwargs["position_ids"] = None
        return args, kwargs

    model.register_forward_pre_hook(drop_positions, with_kwargs=True)

    assert not keeps_apart(model)


def test_a_model_that_says_no_numbers_keeps_nothing_apart():
    model = causal_model("llama", KEEPING["llama"])
    model.lm_head.weight.data.fill_(torch.nan)

    assert not keeps_apart(model)


def state(model):
    return (
        [module.training for module in model.modules()],
        [tensor.clone() for tensor in (*model.parameters(), *model.buffers())],
        [tensor.grad for tensor in model.parameters()],
        [torch.get_rng_state(), torch.tensor(random.getstate()[1])],
        np.random.get_state()[1].tolist(),
    )


@pytest.mark.parametrize("kind", ["gpt2", "opt", "mixtral"])
def test_the_model_and_the_random_streams_stay_as_they_were(kind):
    model = causal_model(kind, (KEEPING | MIXING)[kind])
    next(model.children()).eval()
    before = state(model)

    keeps_apart(model)

    torch.testing.assert_close(state(model), before, rtol=0, atol=0)


class Restless(nn.Module):
    """Counts its calls in all the ways that a module may, and draws."""

    def __init__(self):
        super().__init__()
        self.layer = nn.BatchNorm1d(2)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        self.register_buffer("scale", torch.rand(2) + random.random() + np.random.rand())
        return self.layer(x) * self.scale


def test_what_a_call_counts_or_puts_in_place_of_a_buffer_is_put_back():
    model = Restless()
    scale, before = model.scale, state(model)

    with untouched(model):
        model.layer.train()
        model(torch.rand(4, 2))

    assert model.calls == 0
    assert model.scale is scale
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)


def test_a_call_that_fails_leaves_nothing_behind_either():
    model = Restless()
    before = state(model)

    with pytest.raises(RuntimeError), untouched(model):
        model(torch.rand(4, 3))

    torch.testing.assert_close(state(model), before, rtol=0, atol=0)


def test_weights_get_their_gradients_where_autocast_was_on_before():
    model = causal_model("llama", KEEPING["llama"])
    tokens = torch.arange(24).view(2, 12)

    with torch.autocast("cpu", torch.bfloat16):
        keeps_apart(model)
        model(input_ids=tokens, labels=tokens).loss.backward()

    assert all(parameter.grad is not None for parameter in model.parameters())


def losses(model, between):
    """Return the losses of a training in which something else comes after each step."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, found = torch.arange(24).view(2, 12), []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        between(model)
    return found


def test_a_training_with_dropout_goes_on_as_it_would_have():
    plain, tried = (causal_model("gpt2", KEEPING["gpt2"]) for _ in range(2))

    assert losses(tried, keeps_apart) == losses(plain, lambda _: None)


def test_nothing_is_compiled_for_it():
    model, compiled = causal_model("llama", KEEPING["llama"]), []
    model.compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)

    assert keeps_apart(model)

    assert compiled == []


def test_the_samples_it_makes_up_fill_two_rows_of_two():
    places = first_fit(LENGTHS, WIDTH)

    assert places == [(0, 0), (0, 13), (1, 0), (1, 9)]


def test_hooks_and_modes_of_the_script_do_not_see_the_trial():
    seen = []

    class Merging(nn.Linear):
        """Merges its adapter when it is told to evaluate, as loralib does."""

        def train(self, *mode):
            seen.append(mode)
            return super().train(*mode)

    model = causal_model("llama", KEEPING["llama"])
    model.model.layers[0].mlp.down_proj = Merging(64, 32, bias=False)
    model.model.register_forward_hook(lambda *_: seen.append("batch"))
    hooks = dict(model.model._forward_hooks)

    assert keeps_apart(model)

    assert seen == []
    assert model.model._forward_hooks == hooks
    assert model.model.layers[0].mlp.down_proj.training
