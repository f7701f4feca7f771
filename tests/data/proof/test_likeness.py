import numpy as np
import pytest
import torch

from flatout.data.proof.batches import describe, difference

LABELS = torch.tensor([1, 2, 3, 4])


def pictures():
    noise = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(noise, (64, 64), mode="bilinear")


def compared(ours, theirs):
    return difference(describe(ours), describe(theirs))


def test_the_same_and_nearly_the_same_are_alike():
    one = pictures()

    assert compared([one, LABELS], [one.clone(), LABELS.clone()]) == ""
    assert compared([one, LABELS], [one + 0.02 * torch.randn_like(one), LABELS]) == ""
    assert compared([(127 + 40 * one).byte().numpy()], [(127 + 40 * one).byte().numpy()]) == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flip(0),
        lambda x: x.flip(2),
        lambda x: x.roll(12, 2),
        lambda x: 1.2 * x,
        lambda x: x + 0.2,
        lambda x: x * float("nan"),
    ],
)
def test_other_pictures_are_not(change):
    assert "not alike" in compared([pictures(), LABELS], [change(pictures()), LABELS])


def test_labels_forms_and_fields_have_to_be_the_same():
    one = pictures()

    assert "holds no pictures" in compared([one, LABELS], [one, LABELS + 1])
    assert "instead of" in compared([one, LABELS], [one.double(), LABELS])
    assert "instead of" in compared([one, LABELS], [one[:, :, :32], LABELS])
    assert "1 fields instead of 2" in compared([one, LABELS], [one])
    assert compared([np.zeros((2, 3))], [np.ones((2, 3))])
