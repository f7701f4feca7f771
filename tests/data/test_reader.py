import json
import pickle
import random
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate

import flatout.data
from flatout.data.format import Encoding
from flatout.data.packed_store import map_file
from flatout.data.reader import Gathered
from flatout.data.sampler import Slot
from flatout.records.errors import UserError
from tests.data.packs import image_folder, packed
from tests.paths import ROOT

SQUARE = (32, 32)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with photographs, packed in several ways."""
    root = tmp_path_factory.mktemp("reader")
    photos = image_folder(root / "photos", 30)
    packed(photos, root / "files")
    packed(photos, root / "raw", encoding=Encoding(kind="raw"))
    square = image_folder(root / "square", 30, size=SQUARE)
    packed(square, root / "even", encoding=Encoding(kind="raw"), shard_bytes=20_000)
    return root


@pytest.mark.parametrize("name", ["files", "raw"])
def test_images_are_what_pillow_makes_of_the_files(root, name):
    data = flatout.data.open(root / name, order="source")
    names = sorted((root / "photos").rglob("*.jpeg"))

    for (image, label), path in zip(data, names, strict=True):
        assert np.array_equal(image.numpy(), np.asarray(Image.open(path).convert("RGB")))
        assert data.classes[label] == path.parent.name


def test_images_come_as_asked(root):
    tensor, array, picture, data = (
        flatout.data.open(root / "files", decode=kind)[3][0]
        for kind in ("tensor", "numpy", "pil", "bytes")
    )

    assert tensor.dtype == torch.uint8
    assert np.array_equal(tensor.numpy(), array)
    assert np.array_equal(np.asarray(picture), array)
    assert flatout.data.open(root / "files", decode=len)[3][0] == len(data)


def test_pixels_have_no_file_to_give(root):
    with pytest.raises(UserError, match="holds pixels, not image files"):
        flatout.data.open(root / "raw", decode="bytes")[0]


def test_a_batch_of_equal_shapes_is_gathered_and_equals_single_samples(root):
    data = flatout.data.open(root / "even")
    indices = [5, 0, 29, -1, 5]

    gathered = data.__getitems__(indices)
    images, labels = flatout.data.collate(gathered)

    assert isinstance(gathered, Gathered)
    expected = default_collate([data[index] for index in indices])
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [None, flatout.data.collate])
def test_any_loader_gives_the_same_batches(root, workers, collate):
    data = flatout.data.open(root / "even")

    loader = DataLoader(data, 8, num_workers=workers, collate_fn=collate)

    images = torch.cat([batch[0] for batch in loader])
    assert torch.equal(images, torch.stack([data[n][0] for n in range(30)]))


def test_images_of_different_sizes_come_one_by_one(root):
    data = flatout.data.open(root / "raw")

    samples = data.__getitems__(range(12))

    assert isinstance(samples, list)
    assert len({image.shape for image, _label in samples}) > 1


def test_the_files_are_mapped_by_the_process_that_reads_and_not_before(root):
    data = flatout.data.open(root / "files")
    data[0]

    sent = pickle.dumps(data)
    again = pickle.loads(sent)

    assert len(sent) < 5_000
    assert "_maps" not in vars(again.store)
    assert torch.equal(again[7][0], data[7][0])


@pytest.fixture
def few_descriptors():
    """Let this process open few files: half of what is usual would take a store of 32 GiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 80, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as on Linux")
def test_a_store_of_more_shards_than_files_may_be_open_is_read(tmp_path, few_descriptors):
    np.savez(tmp_path / "some.npz", x=np.arange(800).reshape(200, 4), label=np.arange(200) % 7)
    packed(tmp_path / "some.npz", tmp_path / "store", shard_bytes=1)
    data = flatout.data.open(tmp_path / "store", order="source")

    data.store.will_need(range(200))
    found = [data[number]["x"][0].item() for number in range(200)]

    assert len(data.header.shards) == 200
    assert found == list(range(0, 800, 4))
    assert flatout.data.collate(data.__getitems__(range(200)))["x"][:, 0].tolist() == found


def test_a_shard_that_was_cut_off_since_the_store_was_opened_is_not_read(tmp_path):
    packed(image_folder(tmp_path / "photos", 6), tmp_path / "store")
    data = flatout.data.open(tmp_path / "store")
    shard = tmp_path / "store" / data.header.shards[0].name
    shard.write_bytes(shard.read_bytes()[:-1])

    with pytest.raises(UserError, match="bytes instead of"):
        data[0]


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="looks at Linux's list of maps")
def test_what_was_read_is_unmapped_with_the_last_view_of_it(tmp_path):
    path = tmp_path / "some"
    path.write_bytes(b"abc" * 5000)
    maps = Path("/proc/self/maps")
    found = map_file(path)
    part = found[3:6]
    del found

    assert bytes(part) == b"abc"
    assert str(path) in maps.read_text()
    with pytest.raises(TypeError):
        part[0] = 1
    del part
    assert str(path) not in maps.read_text()


def test_a_transform_gets_the_image(root):
    data = flatout.data.open(root / "files", decode="pil", transform=lambda image: image.size)

    assert {type(size) for size, _label in data} == {tuple}


def test_a_transform_gets_the_whole_of_a_mapping(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"a": n}) + "\n" for n in range(3)))
    packed(tmp_path / "a.jsonl", tmp_path / "a")

    data = flatout.data.open(tmp_path / "a", order="source", transform=lambda row: row["a"] + 1)

    assert list(data) == [1, 2, 3]


class Noise:
    """An augmentation that draws from three streams."""

    def __call__(self, image):
        drawn = random.random() + np.random.rand() + torch.rand(1).item()
        return torch.tensor([drawn, float(image[0, 0, 0])], dtype=torch.float64)


def drawn(root, workers, seed=0, epochs=2, **options):
    data = flatout.data.open(root / "files", transform=Noise(), seed=seed)
    order = flatout.data.GlobalOrder(30, 8)
    loader = DataLoader(data, batch_sampler=order, num_workers=workers, **options)
    return [[batch[0] for batch in order.follow(loader)] for _ in range(epochs)]


def test_augmentation_is_a_function_of_seed_epoch_and_sample(root):
    plain = drawn(root, 0)

    with_workers = drawn(root, 2, persistent_workers=True, prefetch_factor=3)

    for one, other in zip(plain, with_workers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(plain[0][0], plain[1][0])
    assert not torch.equal(plain[0][0], drawn(root, 0, seed=1)[0][0])


def test_the_order_of_the_source_is_there_for_comparing(root):
    data = flatout.data.open(root / "files", order="source")

    assert data.targets == sorted(data.targets)
    assert flatout.data.open(root / "files").targets != data.targets


@pytest.mark.parametrize("index", [30, -31])
def test_samples_outside_are_refused(root, index):
    with pytest.raises(IndexError):
        flatout.data.open(root / "files")[index]


@pytest.mark.parametrize("options", [{"decode": "jpeg"}, {"order": "random"}])
def test_unknown_options_are_named_with_what_is_allowed(root, options):
    with pytest.raises(UserError, match="give one of"):
        flatout.data.open(root / "files", **options)


def test_folders_that_are_no_store_are_refused_with_what_to_do(root, tmp_path):
    with pytest.raises(UserError, match="make one: flatout pack"):
        flatout.data.open(tmp_path / "nothing")
    with pytest.raises(UserError, match="is no packed store"):
        flatout.data.open(root / "photos")


@pytest.fixture
def copy(root, tmp_path):
    packed(root / "photos", tmp_path / "a")
    return tmp_path / "a"


def test_a_store_of_a_later_version_is_refused(copy):
    text = (copy / "header.json").read_text()
    (copy / "header.json").write_text(text.replace("flatout.packed/2", "flatout.packed/9"))

    with pytest.raises(UserError, match=r"has the format flatout\.packed/9"):
        flatout.data.open(copy)


def test_damaged_stores_are_refused_with_the_file(copy):
    shard = copy / "shard-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"shard-00000\.bin has \d+ bytes instead of"):
        flatout.data.open(copy)
    shard.unlink()
    with pytest.raises(UserError, match=r"shard-00000\.bin is gone"):
        flatout.data.open(copy)
    shard.write_bytes(whole)
    (copy / "index.npy").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"index\.npy is damaged"):
        flatout.data.open(copy)[0]
    (copy / "header.json").write_text("{")
    with pytest.raises(UserError, match=r"header\.json is damaged"):
        flatout.data.open(copy)


def read_one(data, index):
    return data[index]


def read_batch(data, index):
    return data.__getitems__([0, index])


def read_by_workers(data, index):
    return list(DataLoader(data, 2, sampler=[0, index], num_workers=1))


def read_whole(data, index):
    return list(DataLoader(data, 2, sampler=[0, index]))


def read_crop(data, index):
    crops = flatout.data.Crops(side=8)
    return flatout.data.cropped(data, crops, seed=0).__getitems__([0, index])


def flip_a_bit(folder, place):
    """Change the last byte of a sample where it lies."""
    row = np.load(folder / "index.npy")[place]
    shards = json.loads((folder / "header.json").read_text())["shards"]
    with (folder / shards[row["shard"]]["name"]).open("r+b") as file:
        file.seek(int(row["offset"] + row["length"]) - 1)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def flipped(root, tmp_path):
    """Return an even store of raw pixels of which sample 5 is damaged."""
    packed(root / "square", tmp_path / "a", encoding=Encoding(kind="raw"))
    flip_a_bit(tmp_path / "a", 5)
    return tmp_path / "a"


@pytest.mark.parametrize("read", [read_one, read_batch, read_by_workers, read_whole, read_crop])
def test_a_checked_store_names_the_sample_that_is_damaged(flipped, read):
    data = flatout.data.open(flipped, check=True)
    read(data, 4)

    words = r"sample 5 of \S+a \(\w+/\d+\.jpeg\) is damaged: the bytes in shard-00000\.bin"
    with pytest.raises(UserError, match=words):
        read(data, 5)


@pytest.mark.parametrize("read", [read_one, read_batch, read_whole, read_crop])
def test_a_store_that_is_not_checked_gives_what_is_there(flipped, read):
    assert read(flatout.data.open(flipped), 5) is not None


def test_a_checked_store_gives_the_same_samples(root):
    plain, checked = (flatout.data.open(root / "even", check=kind) for kind in (False, True))

    for (image, label), (other, other_label) in zip(plain, checked, strict=True):
        assert torch.equal(image, other)
        assert label == other_label


def test_what_was_found_whole_is_not_looked_at_again(flipped):
    data = flatout.data.open(flipped, check=True)
    data[4]
    flip_a_bit(flipped, 4)

    data[4]

    with pytest.raises(UserError, match="sample 4 of"):
        pickle.loads(pickle.dumps(data))[4]


def test_a_slot_takes_its_epoch_to_another_process():
    again = pickle.loads(pickle.dumps(Slot(3, 7)))

    assert (again, again.epoch, type(again)) == (3, 7, Slot)


def test_the_page_s_reader_in_numpy_alone_reads_a_record(root):
    page = (ROOT / "docs/packed-format.md").read_text()
    code = page.split("```python")[1].split("```")[0]
    names = {}
    exec(code, names)

    image, label = names["first_record"](root / "raw")

    data = flatout.data.open(root / "raw")
    assert image[0] == 1
    assert image[10:].tobytes() == data[0][0].numpy().tobytes()
    assert int.from_bytes(label.tobytes(), "little") == data[0][1]
