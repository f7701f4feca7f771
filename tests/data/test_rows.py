import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

import flatout.data
from flatout.data.reader import Gathered
from flatout.data.rows import find_layout
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
        }


class Uneven(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.zeros(1 + index % 2, np.uint8)


MIXED, UNEVEN = Mixed(), Uneven()


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
    for name, column in expected.items():
        assert batch[name].dtype == column.dtype
        assert torch.equal(batch[name], column)


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
