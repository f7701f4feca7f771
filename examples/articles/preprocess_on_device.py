"""Augment whole batches on the device instead of one sample after the other on the CPU.

python examples/articles/preprocess_on_device.py flatout tune --only device_preprocess train.py
"""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
images = torch.randint(
    0, 256, (32, 3, 36, 36), dtype=torch.uint8
)  # bytes: a quarter of what floats take to copy
mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def augment(batch, flips, tops, lefts, size=32):
    batch = batch.to(device, non_blocking=True)
    batch = torch.where(flips.to(device)[:, None, None, None], batch.flip(3), batch)
    rows = tops.to(device)[:, None] + torch.arange(size, device=device)
    columns = lefts.to(device)[:, None] + torch.arange(size, device=device)
    samples = torch.arange(len(batch), device=device)[:, None, None]
    batch = batch.permute(0, 2, 3, 1)[samples, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )
    return (batch.float() / 255 - mean.to(device)[:, None, None]) / std.to(device)[:, None, None]


def one_by_one(batch, flips, tops, lefts, size=32):
    found = []
    for image, flip, top, left in zip(batch, flips, tops, lefts, strict=True):
        image = image.flip(2) if flip else image
        image = image[:, top : top + size, left : left + size].float() / 255
        found.append((image - mean[:, None, None]) / std[:, None, None])
    return torch.stack(found)


generator = torch.Generator().manual_seed(0)
flips = torch.rand(32, generator=generator) < 0.5
tops, lefts = torch.randint(0, 5, (2, 32), generator=generator)
same = torch.allclose(
    augment(images, flips, tops, lefts).cpu(), one_by_one(images, flips, tops, lefts), atol=1e-6
)
print(
    f"result: the batch is that of one sample after the other: {same}; "
    f"bytes copied: {images.nbytes * 4 // images.nbytes}x fewer"
)
