"""Copies and helpers of a data set's last lines: followed where they can be, never shared."""

import numpy as np
import pytest
import torch

from tests.data.tails import MEAN, STD, Pictures, noisy_pictures
from tests.data.test_writing import batch_bits, scaled


@pytest.fixture(scope="module")
def pictures():
    return noisy_pictures()


def by_a_helper(image):
    """The helper makes a copy of its own, as numpy's `astype` does, while the caller holds on."""

    def norm(pixels):
        out = pixels.astype(np.float32)
        out -= MEAN
        out /= STD
        return out

    x = scaled(image)
    x = norm(x)
    return torch.from_numpy(x)


def copied_and_changed(image):
    x = scaled(image)
    y = np.array(x)
    y -= 0.5
    return torch.from_numpy(np.stack([np.asarray(x), np.asarray(y)]))


def both(image):
    x = scaled(image)
    y = np.array(x)
    y -= 0.5
    return torch.from_numpy(x), torch.from_numpy(y)


def tensor_copied(image):
    x = scaled(image)
    y = torch.tensor(x)
    y -= 0.5
    return torch.from_numpy(x), y


def looked_at(image):
    x = scaled(image)
    x[..., 0].mean()
    return torch.from_numpy(x)


def looked_at_in_order(image):
    x = scaled(image).transpose(2, 0, 1)
    x.reshape(-1).mean()
    return torch.from_numpy(np.ascontiguousarray(x))


def an_array_looked_at(image):
    x = scaled(image)
    x[..., 0].mean()
    return np.asarray(x)


def a_copy_of_what_was_looked_at(image):
    x = scaled(image)
    x[..., 0].mean()
    y = np.array(x)
    y -= 0.5
    return np.asarray(x), y


class Flat(Pictures):
    """Fields of a sample instead of one within another."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        fields = sample if isinstance(sample, tuple) else (sample,)
        return [part for field in fields for part in (field if type(field) is tuple else (field,))]


TAILS = (
    *(by_a_helper, copied_and_changed, both, tensor_copied, looked_at, looked_at_in_order),
    *(an_array_looked_at, a_copy_of_what_was_looked_at),
)


@pytest.mark.parametrize("tail", TAILS)
def test_batches_are_those_of_the_script(pictures, tail):
    dataset = Flat(pictures, tail)

    plain, _ = batch_bits(dataset, packs=False)
    packed, plan = batch_bits(dataset, packs=True)

    assert packed == plain
    assert plan.trouble == ""


@pytest.mark.parametrize("tail", [by_a_helper, both, tensor_copied])
def test_these_are_followed(pictures, tail):
    _, plan = batch_bits(Flat(pictures, tail), packs=True)

    assert plan.packed > 0
