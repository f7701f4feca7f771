import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import flatout.data
from flatout.data import crop_batches, random_crops
from flatout.data.crop_batches import crop, crop_batch
from flatout.data.format import Encoding
from flatout.data.random_crops import FLIP, HEIGHT, LEFT, TOP, WIDTH, boxes, uniforms
from flatout.data.sampler import Slot
from flatout.records.errors import UserError
from tests.data.packs import file_bytes, image_folder, packed

BILINEAR = Image.Resampling.BILINEAR
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COUNT = 20
CROPS = flatout.data.Crops(side=24)
NORMALISED = flatout.data.Crops(side=24, mean=MEAN, std=STD)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with photographs of two sizes, packed as pixels and as files."""
    root = tmp_path_factory.mktemp("crops")
    photos = image_folder(root / "photos", COUNT)
    packed(photos, root / "raw", encoding=Encoding(kind="raw"), shard_bytes=30_000)
    packed(photos, root / "files")
    return root


def test_a_crop_is_what_pillow_makes_of_it_up_to_rounding(root):
    data = flatout.data.open(root / "raw")
    pixels = data[3][0]
    height, width, _ = pixels.shape

    drawn = uniforms(0, 0, np.arange(30))
    found = boxes(CROPS, drawn, np.full(30, height), np.full(30, width)).tolist()

    for box in found:
        left, top = box[LEFT], box[TOP]
        area = (left, top, left + box[WIDTH], top + box[HEIGHT])
        image = Image.fromarray(pixels.numpy()).crop(area).resize((24, 24), BILINEAR)
        expected = np.asarray(image)[:, ::-1] if box[FLIP] else np.asarray(image)
        made = crop(pixels, box, CROPS).view(24, 24, 3).numpy()
        assert np.abs(made.astype(int) - expected).max() <= 1


def test_batches_do_not_depend_on_how_they_are_read(root):
    data = flatout.data.cropped(flatout.data.open(root / "raw"), CROPS, seed=5)
    slots = [Slot(number, 2) for number in (4, 19, 0, 7, 11, 3, 12, 16, 9, 1, 2)]

    whole, labels = flatout.data.collate(data.__getitems__(slots))

    assert whole.shape == (11, 24, 24, 3)
    assert whole.dtype == torch.uint8
    for row, slot in enumerate(slots):
        image, label = data[slot]
        assert torch.equal(image, whole[row])
        assert label == labels[row] == flatout.data.open(root / "raw")[slot][1]
    again = pickle.loads(pickle.dumps(data)).__getitems__(slots[::-1])
    assert torch.equal(flatout.data.collate(again)[0], whole.flip(0))


def test_pixels_and_files_give_the_same_crops(root):
    stores = (
        flatout.data.open(root / "raw", order="source"),
        flatout.data.open(root / "files", order="source"),
        flatout.data.open(root / "files", order="source", decode=_decoded),
    )

    first, *others = (
        flatout.data.collate(flatout.data.cropped(store, CROPS, seed=1).__getitems__(range(COUNT)))
        for store in stores
    )

    for images, labels in others:
        assert torch.equal(images, first[0])
        assert torch.equal(labels, first[1])


def _decoded(data):
    import io

    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def test_normalised_crops_are_the_normalised_bytes(root):
    store = flatout.data.open(root / "raw")
    indices = list(range(COUNT))

    plain = flatout.data.cropped(store, CROPS, seed=1).__getitems__(indices).columns[0]
    found = flatout.data.cropped(store, NORMALISED, seed=1).__getitems__(indices).columns[0]

    assert found.shape == (COUNT, 3, 24, 24)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, flatout.data.normalised(plain, MEAN, STD))


def test_crops_change_with_the_epoch_and_without_a_seed_with_each_batch(root):
    store = flatout.data.open(root / "raw")
    with_seed = flatout.data.cropped(store, CROPS, seed=1)
    without = flatout.data.cropped(store, CROPS)

    first, second = (with_seed[Slot(3, epoch)][0] for epoch in (0, 1))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    first, second = without[3][0], without[3][0]
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(without[3][0], first)


@pytest.mark.parametrize("collate", [None, flatout.data.collate])
def test_a_loader_with_processes_gives_the_same_batches(root, collate):
    data = flatout.data.cropped(flatout.data.open(root / "raw"), CROPS, seed=1)
    order = flatout.data.GlobalOrder(len(data), 8)

    here = [flatout.data.collate(data.__getitems__(batch)) for batch in _epoch(order)]
    there = list(DataLoader(data, batch_sampler=order, num_workers=2, collate_fn=collate))

    for (images, labels), (others, other_labels) in zip(here, there, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def _epoch(order):
    return list(flatout.data.GlobalOrder(order.samples, order.batch_size))


def test_windows_are_cut_without_resizing(root):
    data = flatout.data.open(root / "raw")
    crops = flatout.data.Crops(side=20, scale=None, flip_share=0.0)

    found = flatout.data.cropped(data, crops, seed=3)[2][0]

    windows = data[2][0].unfold(0, 20, 1).unfold(1, 20, 1).permute(0, 1, 3, 4, 2)
    assert bool((windows == found).flatten(2).all(2).any())


def test_pictures_kept_in_memory_give_the_same_windows_one_by_one_and_at_once(root):
    kept = flatout.data.load_pictures(flatout.data.open(root / "raw"), side=32)
    crops = flatout.data.Crops(side=24, scale=None, mean=MEAN, std=STD)
    places = np.array([3, 19, 0, 3])
    drawn = uniforms(1, 0, places)

    one_by_one = crop_batch(kept, places, crops, drawn)
    at_once = kept.crop_batch(places, crops, drawn)

    torch.testing.assert_close(at_once, one_by_one)
    source = flatout.data.open(root / "raw")
    middle = source[3][0]
    top, left = (middle.shape[0] - 32) // 2, (middle.shape[1] - 32) // 2
    assert torch.equal(kept.images[3], middle[top : top + 32, left : left + 32])
    data = flatout.data.cropped(kept, crops, seed=1)
    assert data[3][1] == source[3][1]


@pytest.mark.gpu
def test_pictures_on_a_device_give_the_windows_of_the_host(root):
    crops = flatout.data.Crops(side=24, scale=None)
    store = flatout.data.open(root / "raw")
    here, there = (
        flatout.data.cropped(flatout.data.load_pictures(store, side=32, device=d), crops, seed=1)
        for d in ("cpu", "cuda")
    )

    expected, found = (data.__getitems__(range(COUNT)).columns[0] for data in (here, there))

    assert found.is_cuda
    assert torch.equal(found.cpu(), expected)


def test_grey_pictures_become_rgb(tmp_path):
    (tmp_path / "grey").mkdir()
    (tmp_path / "grey" / "one.png").write_bytes(file_bytes(1, "png", mode="L"))
    packed(tmp_path / "grey", tmp_path / "store", encoding=Encoding(kind="raw"))

    found = flatout.data.cropped(flatout.data.open(tmp_path / "store"), CROPS, seed=0)[0]

    picture = found[0] if isinstance(found, tuple) else found
    assert torch.equal(picture[..., 0], picture[..., 2])


def test_what_cannot_be_cropped_is_said(root):
    raw = flatout.data.open(root / "raw")

    with pytest.raises(UserError, match="36 pixels high or wide, the crop 40"):
        flatout.data.cropped(raw, flatout.data.Crops(side=40, scale=None))[0]
    with pytest.raises(UserError, match="open the store without one"):
        flatout.data.cropped(flatout.data.open(root / "raw", transform=len), CROPS)
    with pytest.raises(UserError, match="not decode='pil'"):
        flatout.data.cropped(flatout.data.open(root / "raw", decode="pil"), CROPS)
    with pytest.raises(UserError, match="differ in size"):
        flatout.data.load_pictures(raw)
    with pytest.raises(UserError, match="smaller than side=40"):
        flatout.data.load_pictures(raw, side=40)
    kept = flatout.data.load_pictures(raw, side=32)
    with pytest.raises(UserError, match=r"scale=None"):
        kept.crop_batch(np.zeros(1, np.int64), CROPS, uniforms(0, 0, [0]))
    with pytest.raises(IndexError):
        flatout.data.cropped(raw, CROPS)[COUNT]


def test_pages_that_were_read_are_let_go_and_can_be_read_again(root, monkeypatch):
    monkeypatch.setattr("flatout.data.packed_store.MAX_MAPPED_BYTES", 1)
    data = flatout.data.cropped(flatout.data.open(root / "raw"), CROPS, seed=1)

    first, second = (data.__getitems__(range(COUNT)).columns[0] for _ in range(2))

    assert torch.equal(first, second)
    assert data.pictures.data.store.let_go_count >= 2


@pytest.mark.parametrize("scale", [(0.3, 1.0), None])
@pytest.mark.parametrize("normal", [{}, {"mean": MEAN, "std": STD}])
@pytest.mark.parametrize("store", ["raw", "files"])
def test_without_a_compiler_torch_makes_the_same(root, monkeypatch, scale, normal, store):
    crops = flatout.data.Crops(side=24, scale=scale, **normal)
    data = flatout.data.cropped(flatout.data.open(root / store), crops, seed=0)
    expected, _ = flatout.data.collate(data.__getitems__(range(COUNT)))

    monkeypatch.setattr(crop_batches, "can_cut", lambda: False)
    monkeypatch.setattr(random_crops, "can_decode", lambda: False)

    found, _ = flatout.data.collate(data.__getitems__(range(COUNT)))
    assert found.stride() == expected.stride()
    assert torch.allclose(found.float(), expected.float(), rtol=0, atol=1e-6)
