import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from flatout.records.errors import NotApplicable
from flatout.techniques.data.device_cache.resident_dataset import collate_whole
from tests.techniques.data.samples import Numbers


class Pairs(Numbers):
    def __getitem__(self, index):
        return {"x": torch.full((2, 3), float(index)), "y": (index, index / 3)}


def whole(dataset, budget_bytes=10**9, limit_s=30.0):
    return collate_whole(dataset, budget_bytes=budget_bytes, limit_s=limit_s)


def test_rows_are_what_collating_the_samples_gives():
    dataset = Pairs(600)  # more than are collated at a time
    numbers = [599, 0, 256, 256]

    found = whole(dataset).fetch(numbers)

    expected = default_collate([dataset[i] for i in numbers])
    assert found.keys() == expected.keys()
    assert torch.equal(found["x"], expected["x"])
    assert type(found["y"]) is type(expected["y"])
    for got, wanted in zip(found["y"], expected["y"], strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def test_tensors_are_taken_as_they_are():
    dataset = TensorDataset(torch.arange(6).reshape(3, 2))

    resident = whole(dataset)

    assert resident.whole[0] is dataset.tensors[0]
    assert resident.bytes == 48


class Mixed(Numbers):
    """Samples whose batches depend on which sample comes first in them."""

    def __init__(self, count, change):
        super().__init__(count)
        self.change = change

    def __getitem__(self, index):
        sample = {"x": torch.ones(2), "y": index}
        if index == len(self) - 1:
            self.change(sample)
        return sample


@pytest.mark.parametrize("count", [8, 600])
@pytest.mark.parametrize(
    "change",
    [
        lambda sample: sample.update(y=0.5),
        lambda sample: sample.update(x=torch.ones(2).double()),
        lambda sample: sample.update(more=torch.ones(1)),
        lambda sample: sample.update(y=True),
    ],
)
def test_samples_that_do_not_look_alike_are_refused(count, change):
    with pytest.raises(NotApplicable, match="differ in structure or type"):
        whole(Mixed(count, change))


@pytest.mark.parametrize("dataset", [Pairs(600), TensorDataset(torch.zeros(600, 100))])
def test_a_set_larger_than_its_room_is_refused_early(dataset):
    with pytest.raises(NotApplicable, match="GB are free"):
        whole(dataset, budget_bytes=10_000)


def test_a_set_that_takes_too_long_is_refused():
    with pytest.raises(NotApplicable, match="takes more than 0 s"):
        whole(Pairs(600), limit_s=0.0)
