"""The loss that a model computes itself, of a batch in parts: value and gradients of the whole."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.records.errors import NotApplicable
from flatout.techniques.memory.microbatching import Microbatching
from flatout.techniques.memory.microbatching.own_loss import LOOKS, OwnLoss

ROWS, LENGTH, WORDS = 7, 9, 13


def padded(seed=0):
    """Return texts of many lengths; what pads them does not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (ROWS,), generator=generator)
    is_text = torch.arange(LENGTH) < lengths[:, None]
    return {
        "input_ids": tokens,
        "attention_mask": is_text.long(),
        "labels": tokens.masked_fill(~is_text, -100),
    }


def gradients_of(model, call, batches, loss_of=lambda output: output.loss):
    losses = []
    for batch in batches:
        loss = loss_of(call(**batch))
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


def check(model, batches, chunks=3, **options):
    """Compare losses and gradients in parts with those of the whole batch; return the technique."""
    technique = Microbatching(chunks=chunks)
    split = copy.deepcopy(model)
    expected, gradients = gradients_of(model, model, batches, **options)

    found, split_gradients = gradients_of(
        split, technique.forward(split, split), batches, **options
    )

    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(split_gradients, gradients, rtol=1e-3, atol=1e-6)
    return technique


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=32, **sizes, **heads)
    )


@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": torch.tensor(40)}])
def test_a_language_model_trains_on_padded_texts_as_on_the_whole_batch(given):
    technique = check(llama(), [padded(seed) | given for seed in range(4)])

    assert technique.end() == ""


class Words(nn.Module):
    """A tagger and a classifier in one; the loss is whatever the test says."""

    def __init__(self, loss, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.drop, self.loss = nn.Dropout(dropout), loss

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.drop(self.table(input_ids)))
        return {"loss": self.loss(logits, labels), "logits": logits}


def tagged(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def summed(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def of_samples(logits, labels):
    return logits.square().mean()


def contrastive(logits, labels):
    rows = nn.functional.normalize(logits.mean(1), dim=-1)
    return nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


@pytest.mark.parametrize("loss", [tagged, summed, of_samples])
def test_each_kind_of_loss_is_made_of_its_parts(loss):
    batches = [padded(seed) for seed in range(3)]

    technique = check(Words(loss), batches, loss_of=lambda out: out["loss"])

    assert technique.end() == ""


def test_a_loss_that_couples_the_samples_is_computed_whole_and_said():
    batches = [padded(), padded(1)]

    technique = check(Words(contrastive), batches, loss_of=lambda out: out["loss"])

    with pytest.raises(NotApplicable, match="no sum or mean of its parts"):
        technique.end()


def test_a_part_without_a_label_that_counts_adds_nothing():
    batch = padded()
    batch["labels"][:4] = -100

    check(Words(tagged), [batch], loss_of=lambda out: out["loss"])


def test_trying_it_out_leaves_the_model_and_the_streams_as_they_were():
    model = Words(tagged, dropout=0.5).train()
    model.drop.eval()
    before = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    batch = padded()

    weights = OwnLoss().weights(model, model, ((), batch), [((), batch), ((), batch)])

    assert weights == [0.5, 0.5]
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


def test_a_trace_of_shapes_needs_no_values():
    with FakeTensorMode():
        model = Words(tagged)
        batch = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long)}
        batch["labels"] = batch["input_ids"]

        technique = Microbatching(chunks=3)
        loss = technique.forward(model, model)(**batch)["loss"]
        loss.backward()

    assert loss.shape == ()
    assert technique.end() == ""


def test_what_is_alike_on_the_first_batch_is_told_apart_later():
    model, full = Words(tagged), padded()
    full["labels"] = full["input_ids"]  # nothing is padded: many weighings give the same

    check(model, [full, padded(1), padded(2)], loss_of=lambda out: out["loss"])


def test_looking_ends_where_nothing_tells_them_apart():
    own, model, calls = OwnLoss(), Words(of_samples), []
    model.register_forward_hook(lambda *_: calls.append(1))

    for seed in range(LOOKS + 4):
        batch = padded(seed)
        halves = [
            ((), {k: v[:3] for k, v in batch.items()}),
            ((), {k: v[3:] for k, v in batch.items()}),
        ]
        own.weights(model, model, ((), batch), halves)

    assert len(calls) <= 3 * LOOKS
    assert own.left == ["by samples"]
