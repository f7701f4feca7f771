"""torchvision's transforms, old and new; skipped where torchvision is not installed.

Beside a CPU build of torch, torchvision's wheel lacks two operators and cannot be imported; their
names are enough.
"""

import importlib.util

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from flatout.techniques.data.device_preprocess import send_bytes
from tests.data.tails import Pictures

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("needs torchvision", allow_module_level=True)
try:
    from torchvision import transforms
except RuntimeError:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision import transforms
from torchvision.transforms import v2

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OLD, NEW = transforms.Normalize(MEAN, STD), v2.Normalize(MEAN, STD)
CROP = transforms.RandomResizedCrop(64)
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
COMPOSED = {
    "to tensor": transforms.Compose([CROP, transforms.ToTensor(), OLD]),
    "flipped after": transforms.Compose(
        [CROP, transforms.ToTensor(), OLD, transforms.RandomHorizontalFlip()]
    ),
    "converted": transforms.Compose(
        [CROP, transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float32), OLD]
    ),
    "v2 image": v2.Compose([v2.ToImage(), v2.RandomResizedCrop(64), TO_FLOAT, NEW]),
    "v2 from Pillow": v2.Compose([v2.RandomResizedCrop(64), v2.ToImage(), TO_FLOAT, NEW]),
    "v2 pure": v2.Compose([v2.PILToTensor(), TO_FLOAT, NEW, v2.ToPureTensor()]),
}


def both_ways(tail):
    """Return the batch as it is made ordinarily, the one that travelled, and the loader."""
    noise = np.random.default_rng(0)
    made = [noise.integers(0, 256, (80, 90, 3), dtype=np.uint8) for _ in range(6)]
    dataset = Pictures([Image.fromarray(pixels) for pixels in made], tail)
    dataset.__class__ = type("Unflipped", (Pictures,), {"__getitem__": unflipped})
    torch.manual_seed(0)
    expected = next(iter(DataLoader(dataset, 6)))
    built = send_bytes(DataLoader(dataset, 6))
    torch.manual_seed(0)
    found = next(iter(built))
    assert torch.equal(found[0], expected[0])
    assert type(found[0]) is type(expected[0])
    return built


@pytest.mark.parametrize("name", COMPOSED)
def test_a_composed_transform_travels_as_bytes_and_arrives_bit_by_bit(name):
    assert both_ways(COMPOSED[name]).collate_fn.packed == 1


def unflipped(dataset, index):
    return dataset.tail(dataset.pictures[index]), index
