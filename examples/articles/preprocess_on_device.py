"""Augment whole batches on the device instead of one sample after the other on the CPU.

Crop, flip and normalise give the same numbers there. Colour does too, up to the rounding of its
sums; torchvision's v2 transforms draw once for a batch, kornia's once for each sample, as here.

python examples/articles/preprocess_on_device.py flatout tune --only device_preprocess train.py
"""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
images = torch.randint(
    0, 256, (32, 3, 36, 36), dtype=torch.uint8
)  # bytes: a quarter of what floats take to copy
mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
grey = torch.tensor([0.299, 0.587, 0.114])


def jittered(x, brightness, contrast, saturation):
    """Return pictures (..., 3, height, width) in [0, 1] with other colours."""
    x = (x * brightness).clamp(0, 1)
    light = (x * grey.to(x.device)[:, None, None]).sum(-3, keepdim=True)
    middle = light.mean((-2, -1), keepdim=True)
    x = (contrast * x + (1 - contrast) * middle).clamp(0, 1)
    light = (x * grey.to(x.device)[:, None, None]).sum(-3, keepdim=True)
    return (saturation * x + (1 - saturation) * light).clamp(0, 1)


def augment(batch, flips, tops, lefts, colours, size=32):
    batch = batch.to(device, non_blocking=True)
    batch = torch.where(flips.to(device)[:, None, None, None], batch.flip(3), batch)
    rows = tops.to(device)[:, None] + torch.arange(size, device=device)
    columns = lefts.to(device)[:, None] + torch.arange(size, device=device)
    samples = torch.arange(len(batch), device=device)[:, None, None]
    batch = batch.permute(0, 2, 3, 1)[samples, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )
    batch = jittered(batch.float() / 255, *colours.to(device)[:, :, None, None, None])
    return (batch - mean.to(device)[:, None, None]) / std.to(device)[:, None, None]


def one_by_one(batch, flips, tops, lefts, colours, size=32):
    found = []
    for image, flip, top, left, colour in zip(batch, flips, tops, lefts, colours.T, strict=True):
        image = image.flip(2) if flip else image
        image = jittered(image[:, top : top + size, left : left + size].float() / 255, *colour)
        found.append((image - mean[:, None, None]) / std[:, None, None])
    return torch.stack(found)


generator = torch.Generator().manual_seed(0)
flips = torch.rand(32, generator=generator) < 0.5
tops, lefts = torch.randint(0, 5, (2, 32), generator=generator)
colours = 0.6 + 0.8 * torch.rand(3, 32, generator=generator)
plain = torch.ones(3, 32)


def is_same(colours, atol):
    found = augment(images, flips, tops, lefts, colours).cpu()
    return torch.allclose(found, one_by_one(images, flips, tops, lefts, colours), atol=atol)


print(
    f"result: the batch is that of one sample after the other: {is_same(plain, 1e-6)}; with other "
    f"colours, to 1e-4: {is_same(colours, 1e-4)}; "
    f"bytes copied: {images.nbytes * 4 // images.nbytes}x fewer"
)
