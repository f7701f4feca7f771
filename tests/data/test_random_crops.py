import pytest
import torch

from flatout.data import normalised

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("shape", [(3, 224, 224, 3), (2, 1, 1, 3), (1, 300, 700, 3), (0, 8, 8, 3)])
def test_it_is_to_tensor_and_normalize_of_every_sample(shape):
    images = torch.randint(0, 256, shape, dtype=torch.uint8)

    found = normalised(images, MEAN, STD)

    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    expected = (images.permute(0, 3, 1, 2).float() / 255 - mean) / std
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert found.permute(0, 2, 3, 1).is_contiguous()


def test_grey_images_have_one_channel():
    images = torch.full((2, 4, 4, 1), 255, dtype=torch.uint8)

    torch.testing.assert_close(normalised(images, (0.5,), (0.5,)), torch.ones(2, 1, 4, 4))


def test_the_images_stay_as_they_are():
    images = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    before = images.clone()

    normalised(images.transpose(1, 2), MEAN, STD)

    assert images.equal(before)


@pytest.mark.parametrize(
    "images",
    [torch.zeros(2, 3, 8, 8), torch.zeros(8, 8, 3, dtype=torch.uint8)],
    ids=["floats", "one image"],
)
def test_what_is_no_batch_of_bytes_is_refused(images):
    with pytest.raises(ValueError, match="uint8 of 4 dimensions"):
        normalised(images, MEAN, STD)


def test_channels_and_means_must_fit():
    with pytest.raises(ValueError, match="1 channels, 3 means"):
        normalised(torch.zeros(1, 2, 2, 1, dtype=torch.uint8), MEAN, STD)
