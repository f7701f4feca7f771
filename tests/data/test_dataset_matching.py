import numpy as np
import pytest
import torch
from torch.utils.data import Subset

import flatout.data
from flatout.data.dataset_matching import store_behind, with_stored_samples
from flatout.records.errors import NotApplicable
from tests.data.packs import Items, packed

SAMPLES = 200


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    np.savez(folder / "some.npz", x=np.arange(SAMPLES), label=np.arange(SAMPLES) % 7)
    packed(folder / "some.npz", folder / "packed")
    return folder / "packed"


class Wrapped:
    """A data set around another, as scripts write them."""

    def __init__(self, data, number=lambda index: [index]):
        self.data, self.number, self.calls = data, number, 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.calls += 1
        samples = [self.data[number] for number in self.number(index)]
        return sum(float(sample["x"]) for sample in samples) + torch.rand(())


class Whole(Wrapped):
    """One that asks for samples in lists."""

    def __getitem__(self, index):
        return self.data.__getitems__([index])[0]["x"]


class Twice(Wrapped):
    """A wrapper in a wrapper."""

    def __init__(self, data):
        super().__init__(Whole(data))

    def __getitem__(self, index):
        return self.data[index]


@pytest.mark.parametrize("order", ["stored", "source"])
@pytest.mark.parametrize("wrap", [Wrapped, Whole, Twice])
def test_a_wrapper_is_looked_through_and_stays_as_it_was(store, order, wrap):
    data = flatout.data.open(store, order=order)
    wrapped = wrap(data)
    streams = torch.get_rng_state()

    found = store_behind(wrapped)

    assert found.store is data.store
    assert found.is_reordered is (order == "source")
    assert wrapped.calls == 0
    assert type(data) is flatout.data.PackedDataset
    assert torch.equal(torch.get_rng_state(), streams)


def test_samples_matched_with_a_store_are_numbered_as_in_the_source(store):
    data = flatout.data.open(store, order="source")
    listed = Items([data[number] for number in range(SAMPLES)])

    found = store_behind(with_stored_samples(listed, data.store))

    assert found.is_reordered


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (lambda index: [SAMPLES - 1 - index], "is made of 199 of the packed store"),
        (lambda index: [index, (index + 3) % SAMPLES], "is made of 0, 3 of the packed store"),
        (lambda _: [], "is made of no sample of the packed store"),
        (lambda index: [index // 0], "ZeroDivisionError"),
    ],
)
def test_samples_that_are_mixed_or_numbered_otherwise_are_refused(store, number, trouble):
    with pytest.raises(NotApplicable, match=trouble):
        store_behind(Wrapped(flatout.data.open(store), number))


def test_parts_of_a_store_and_other_data_sets_are_refused(store):
    data = flatout.data.open(store)
    turned = Subset(data, list(range(SAMPLES))[::-1])

    with pytest.raises(NotApplicable, match="is made of 199"):
        store_behind(turned)
    for other in (Subset(data, range(9)), Items([1, 2]), [1, 2]):
        with pytest.raises(NotApplicable, match="does not read its samples from a packed store"):
            store_behind(other)
