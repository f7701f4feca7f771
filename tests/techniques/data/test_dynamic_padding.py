import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from flatout.records.errors import NotApplicable
from flatout.techniques.data.dynamic_padding import DynamicPadding, Trimmed
from tests.data.texts import Texts
from tests.techniques.data.samples import Numbers
from tests.techniques.facts import loader, machine, model, profile

PROMISE = "this module compares the contents"


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_as_long_as_their_longest_sample(workers):
    asked = {"dataset": Texts(), "batch_size": 3, "num_workers": workers}

    found = list(DataLoader(**DynamicPadding(multiple_of=2).loader(asked)))
    plain = list(DataLoader(**asked))

    assert [batch["input_ids"].shape[1] for batch in found] == [4, 6] * 4
    for short, whole in zip(found, plain, strict=True):
        width = short["input_ids"].shape[1]
        assert torch.equal(short["number"], whole["number"])
        assert all(
            torch.equal(short[name], whole[name][:, :width])
            for name in ("input_ids", "attention_mask", "labels")
        )


def test_batches_without_a_mask_are_left_alone():
    with pytest.raises(NotApplicable, match="no attention_mask"):
        DynamicPadding().loader({"dataset": Numbers(), "batch_size": 2})


def test_a_rebuilt_loader_is_not_cut_twice():
    once = DynamicPadding().loader({"dataset": Texts(), "batch_size": 2})

    assert DynamicPadding().loader(once) is once


def test_the_collate_function_keeps_what_it_has_and_can_be_sent_to_a_worker():
    class Collator:
        tokenizer = "mine"

        def __call__(self, samples):
            return samples

    assert Trimmed(Collator()).tokenizer == "mine"
    assert pickle.loads(pickle.dumps(Trimmed(len)))("ab") == 2


def padded(share, shapes=1):
    loaders = (loader(pad_share=share),)
    return profile(loaders=loaders, models=(model(input_shapes=shapes),))


def test_it_is_offered_for_fixed_lengths_with_padding():
    assert DynamicPadding.candidates(padded(0.5), machine()) == [DynamicPadding()]
    assert DynamicPadding.candidates(padded(0.5, shapes=7), machine()) == ()
    assert DynamicPadding.candidates(padded(0.01), machine()) == ()
    assert DynamicPadding.candidates(padded(None), machine()) == ()


def test_half_of_the_padding_is_expected_to_go():
    assert DynamicPadding().predict(padded(0.4), machine()).step_ms == pytest.approx(-20.0)
