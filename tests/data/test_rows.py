import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, default_collate

import flatout.data
from flatout.data.format import Encoding
from flatout.data.reader import Gathered, Stacked, find_layout
from tests.data.packs import image_folder, packed

COUNT = 40


class Mixed(Dataset):
    """Samples of several numbers and arrays."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {
            "small": np.arange(6, dtype=np.int16).reshape(2, 3) + index,
            "large": torch.full((1500,), float(index)),
            "number": index,
            "share": index / 7,
            "is_odd": bool(index % 2),
            "list": [index, index + 1],
        }


class Uneven(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.zeros(1 + index % 2, np.uint8)


class Tensors(Dataset):
    """Samples that are one tensor each, with nothing around it."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.arange(6).reshape(2, 3) * index


MIXED, UNEVEN, TENSORS = Mixed(), Uneven(), Tensors()


@pytest.fixture(scope="module", params=[10_000_000, 30_000], ids=["one shard", "many shards"])
def data(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    packed_from("MIXED", folder / "store", shard_bytes=request.param)
    return flatout.data.open(folder / "store")


def packed_from(name, folder, **options):
    packed(f"{__file__}:{name}", folder, **options)


def test_every_field_is_gathered_as_single_samples_give_it(data):
    indices = [3, 39, 0, -1, 17, 17]

    found = data.__getitems__(indices)

    assert isinstance(found, Gathered)
    batch, expected = flatout.data.collate(found), default_collate([data[i] for i in indices])
    assert batch.keys() == expected.keys()
    assert_close(batch, expected, rtol=0, atol=0)


def scaled(samples):
    """A collation that changes the samples, as many do."""
    samples.sort(key=lambda sample: -sample["number"])
    samples.pop()
    for sample in samples:
        sample["share"] = sample["share"] * 100
    return flatout.data.collate(samples)


def test_a_collation_may_change_the_samples_of_a_batch(data):
    indices = [3, 39, 0, 17]

    batch = scaled(data.__getitems__(indices))

    assert_close(batch, scaled([data[index] for index in indices]), rtol=0, atol=0)
    assert batch["share"].tolist() == [100 * (n / 7) for n in batch["number"].tolist()]


def test_an_epoch_gives_each_sample_once_in_the_sampler_s_order(data):
    order = flatout.data.GlobalOrder(COUNT, 16)
    expected = [slot for batch in flatout.data.GlobalOrder(COUNT, 16) for slot in batch]

    batches = [flatout.data.collate(data.__getitems__(batch)) for batch in order]

    numbers = torch.cat([batch["number"] for batch in batches])
    assert numbers.tolist() == [data[int(slot)]["number"] for slot in expected]
    assert sorted(numbers.tolist()) == list(range(COUNT))


def test_numbers_outside_are_named(data):
    with pytest.raises(IndexError, match="sample 40 of 40"):
        data.__getitems__([0, 40])


def test_no_samples_make_an_empty_batch(data):
    assert len(data.__getitems__([])) == 0


def test_records_that_differ_have_no_layout(tmp_path):
    packed_from("UNEVEN", tmp_path / "uneven")
    photos = image_folder(tmp_path / "photos", 6)
    packed(photos, tmp_path / "files")

    for name in ("uneven", "files"):
        assert find_layout(flatout.data.open(tmp_path / name).store) is None


def opened(kind, folder):
    """Return a packed set whose samples are single tensors: of a data set, or pictures."""
    if kind == "tensors":
        packed_from("TENSORS", folder / "store")
    else:
        photos = image_folder(folder / "photos", 12, classes=("",), size=(16, 16))
        packed(photos, folder / "store", encoding=Encoding(kind="raw"))
    return flatout.data.open(folder / "store")


@pytest.mark.parametrize("kind", ["tensors", "pictures"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", [None, flatout.data.collate])
def test_single_tensors_are_stacked_by_any_loader(tmp_path, kind, workers, collate):
    data = opened(kind, tmp_path)

    batches = list(DataLoader(data, 5, num_workers=workers, collate_fn=collate))

    assert isinstance(data.__getitems__([0]), Stacked)
    assert torch.equal(torch.cat(batches), default_collate([data[n] for n in range(len(data))]))


def test_single_tensors_that_lie_together_are_not_copied(tmp_path):
    found = opened("tensors", tmp_path).__getitems__([3, 1])

    assert flatout.data.collate(found).data_ptr() == found[0].data_ptr()


@pytest.mark.parametrize("indices", [[], [1]])
def test_single_tensors_that_were_replaced_are_those_of_the_batch(tmp_path, indices):
    data = opened("tensors", tmp_path)
    found = data.__getitems__(indices)

    found.append(data[7])

    batch = flatout.data.collate(found)
    assert torch.equal(batch, torch.stack([data[n] for n in [*indices, 7]]))
