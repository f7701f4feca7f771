from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from flatout.agent.hooks.loader import note_padding, padding_of, tokenizer_place
from tests.data.texts import Texts, Tokenizer
from tests.techniques.data.samples import Numbers

TOKENIZER = Tokenizer()


def by_global(samples):
    return [TOKENIZER(text, 8) for text in samples]


def by_closure():
    tokenizer = Tokenizer()
    return lambda samples: [tokenizer(text, 8) for text in samples]


class ByAttribute:
    def __init__(self):
        self.tokenizer = Tokenizer()

    def __call__(self, samples):
        return samples

    def collate(self, samples):
        return samples


def by_argument(samples, tokenizer):
    return tokenizer(samples)


@pytest.mark.parametrize(
    ("dataset", "collate", "place"),
    [
        (Texts(), None, "data set"),
        (Subset(Texts(), [1]), None, "data set"),
        (Numbers(), by_global, "collate_fn"),
        (Numbers(), by_closure(), "collate_fn"),
        (Numbers(), ByAttribute(), "collate_fn"),
        (Numbers(), ByAttribute().collate, "collate_fn"),
        (Numbers(), partial(by_argument, tokenizer=Tokenizer()), "collate_fn"),
        (Numbers(), None, ""),
        (Numbers(), list, ""),
        ([1, 2], None, ""),
    ],
)
def test_a_tokenizer_is_found_where_it_is_held(dataset, collate, place):
    assert tokenizer_place(dataset, collate) == place


def test_padding_is_what_the_mask_takes_out():
    assert padding_of({"attention_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])}) == 0.625
    assert padding_of({"attention_mask": np.array([[1, 0]])}) == 0.5
    assert padding_of({"x": torch.zeros(2)}) is None
    assert padding_of([torch.zeros(2)]) is None


def test_the_mean_of_the_first_batches_is_kept():
    facts = {}
    for count, pads in enumerate([0, 2, 4]):
        mask = torch.ones(1, 4)
        mask[:, 4 - pads :] = 0
        note_padding(facts, {"attention_mask": mask}, count)

    assert facts["pad_share"] == pytest.approx(0.5)
