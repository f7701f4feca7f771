import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.techniques.data.sequence_packing import SequencePacking, packing
from tests.data.test_padding import batch
from tests.techniques.facts import loader, machine, model, profile

PROMISE = "this module compares the gradients"


def causal_model(attention):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).train()


def tokens(lengths):
    made = batch(lengths, width=24)
    del made["y"]
    return made


def loss_and_gradients(root, call):
    root.zero_grad()
    made = call(**tokens([5, 9, 3, 12, 7, 4]))
    made.loss.backward()
    return made, [p.grad.clone() for p in root.parameters()]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradients_are_the_same_up_to_rounding(attention):
    root = causal_model(attention)

    plain, expected = loss_and_gradients(root, root)
    made, found = loss_and_gradients(root, SequencePacking().forward(root, root))

    assert plain.logits.shape[0] == 6
    assert made.logits.shape[0] == 2
    assert torch.allclose(made.loss, plain.loss, rtol=1e-5)
    assert all(torch.allclose(f, e, atol=1e-5) for f, e in zip(found, expected, strict=True))


def test_samples_do_not_see_each_other():
    root = causal_model("sdpa").eval()
    call = SequencePacking().forward(root, root)
    first, other = tokens([5, 9]), tokens([5, 9])
    other["input_ids"][1] = 7 * other["attention_mask"][1]  # the longer one is placed first

    with torch.no_grad():
        found = [call(**made).logits[0, 9:14] for made in (first, other)]

    assert torch.equal(found[0], found[1])


LEFT = batch([3, 4], width=24, left=True)


@pytest.mark.parametrize(
    "change",
    [
        {"labels": None},
        {"position_ids": torch.zeros(2, 24)},
        {"labels": batch([3, 4], width=24, counts=True)["labels"]},
        {name: LEFT[name] for name in ("input_ids", "attention_mask", "labels")},
    ],
    ids=["no labels", "positions", "labels count padding", "padding predicts the first token"],
)
def test_calls_that_cannot_be_packed_pass_unchanged(change):
    seen = []
    asked = tokens([3, 4]) | change

    packing(lambda **kwargs: seen.append(kwargs))(**asked)

    assert seen[0].keys() == asked.keys()
    assert all(seen[0][name] is asked[name] for name in asked)


def test_padding_on_the_left_that_predicts_nothing_is_taken_out():
    seen = []
    asked = {name: LEFT[name] for name in ("input_ids", "attention_mask", "labels")}
    asked["labels"] = asked["labels"].clone()
    asked["labels"][0, 21] = asked["labels"][1, 20] = -100

    packing(lambda **kwargs: seen.append(kwargs))(**asked)

    assert seen[0]["input_ids"].shape == (1, 24)


def test_models_that_mix_the_samples_of_a_row_are_left_alone():
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(
        vocab_size=128, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4
    )
    root = transformers.OPTForCausalLM(config).train()

    with pytest.raises(NotApplicable, match="samples in one row of OPTForCausalLM see each other"):
        SequencePacking().forward(root, root)


def test_a_model_that_cannot_be_tried_is_left_alone():
    root = causal_model("sdpa")
    root.model.register_forward_pre_hook(lambda *_: 1 / 0)

    with pytest.raises(NotApplicable, match=r"could not be tried.*ZeroDivisionError"):
        SequencePacking().forward(root, root)


def test_a_model_is_tried_once():
    technique = SequencePacking()
    root, calls = causal_model("sdpa"), []
    root.register_forward_pre_hook(lambda *_: calls.append(1))

    technique.forward(root, root)
    tried = len(calls)
    technique.forward(root, root)

    assert (tried, len(calls)) == (2, 2)


def test_other_models_are_left_alone():
    with pytest.raises(NotApplicable, match="Linear is no causal language model"):
        SequencePacking().forward(print, nn.Linear(2, 2))


def padded(share, name="LlamaForCausalLM"):
    return profile(loaders=(loader(pad_share=share),), models=(model(name=name),))


def test_it_is_offered_to_causal_models_with_much_padding():
    assert SequencePacking.candidates(padded(0.5), machine()) == [SequencePacking()]
    assert SequencePacking.candidates(padded(0.1), machine()) == ()
    assert SequencePacking.candidates(padded(0.5, "BertModel"), machine()) == ()


def test_most_of_the_padding_is_expected_to_go():
    assert SequencePacking().predict(padded(0.5), machine()).step_ms == pytest.approx(-45.0)
