"""Look bytes up in Triton's interpreter and print of each case whether every bit is torch's.

In a process of its own: whether Triton interprets is decided when it is imported.
"""

import json
import mmap

import numpy as np
import torch

from flatout.data.random_crops import Crops, boxes, uniforms
from flatout.data.resident_pictures import ResidentPictures
from flatout.kernels import lookup
from flatout.kernels.lookup import looked_up, windows_looked_up

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = {"channels first": (0, 1, 2, 3), "channels last": (0, 2, 3, 1), "turned": (3, 1, 0, 2)}


def table(rows, dtype):
    """Return values among which are no numbers, infinities and both zeros."""
    made = torch.randn(rows, 256, dtype=torch.float64) * 3
    made[:, 5], made[:, 6], made[:, 7], made[:, 8] = float("nan"), float("inf"), 0.0, -0.0
    return made.to(dtype)


def picture_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def ordered(values, order):
    """Return the same values lying in memory in another order of their axes."""
    back = [order.index(place) for place in range(len(order))]
    return values.permute(order).contiguous().permute(back)


def is_torchs(values, levels, axis):
    """Return whether the kernel gave what torch gives: bits, type, shape and strides."""
    wanted = lookup._gathered(values, levels, axis)
    lookup._KEPT.clear()
    looked_up(values, levels, axis)
    if list(lookup._KEPT.values()) != [True]:
        return "not kept"
    gathered, lookup._gathered = lookup._gathered, None
    try:
        found = looked_up(values, levels, axis)
    finally:
        lookup._gathered = gathered
    same = (found.dtype, found.shape, found.stride()) == (
        wanted.dtype,
        wanted.shape,
        wanted.stride(),
    )
    return same and torch.equal(lookup._bits(found), lookup._bits(wanted))


def wholes():
    for name, order in KINDS.items():
        for dtype in DTYPES:
            values = ordered(picture_bytes(3, 3, 37, 41), order)
            yield f"{name} {dtype}", is_torchs(values, table(3, dtype), 1)
    float32 = torch.float32
    yield "one table", is_torchs(picture_bytes(2, 3, 40, 9), table(1, float32), 1)
    yield "no channels", is_torchs(picture_bytes(5, 70, 30), table(1, float32), None)
    yield "one picture", is_torchs(picture_bytes(1, 3, 33, 31), table(3, float32), 1)
    yield "without batch", is_torchs(picture_bytes(33, 31, 3), table(3, float32), 2)
    yield "a row", is_torchs(picture_bytes(3000), table(1, float32), None)
    yield "videos", is_torchs(picture_bytes(2, 3, 4, 20, 9), table(3, float32), 1)
    yield "frames", is_torchs(picture_bytes(2, 4, 3, 20, 9), table(3, float32), 2)
    yield "nothing", is_torchs(picture_bytes(0, 3, 5, 5), table(3, float32), 1)
    part = picture_bytes(4, 3, 60, 50)[1:, :, 3:40:2, 5:]
    yield "a part", is_torchs(part, table(3, float32), 1)
    last = picture_bytes(4, 60, 50, 3).permute(0, 3, 1, 2)[:, :, 7:50, 3:40]
    yield "a part, channels last", is_torchs(last, table(3, float32), 1)


def windows(count, side, channels, dtype):
    images = picture_bytes(6, 40, 50, channels)
    rows = torch.randint(0, 6, (count,))
    tops, lefts = torch.randint(0, 41 - side, (count,)), torch.randint(0, 51 - side, (count,))
    tops[0], lefts[0], rows[0] = 40 - side, 50 - side, 5
    sides, flips = torch.full((count,), side), torch.arange(count) % 2
    boxes = torch.stack([tops, lefts, sides, sides, flips], 1)
    levels = table(channels, dtype)

    def plain():
        cuts = []
        for row, (top, left, _, _, flip) in zip(rows.tolist(), boxes.tolist(), strict=True):
            cut = images[row, top : top + side, left : left + side]
            cuts.append(cut.flip(1) if flip else cut)
        return lookup._gathered(torch.stack(cuts), levels, 3)

    def never():
        raise AssertionError("torch's way after it was shown to be the kernel's")

    lookup._KEPT.clear()
    wanted = windows_looked_up(images, rows, boxes, levels, side, plain)
    if list(lookup._KEPT.values()) != [True]:
        return "not kept"
    found = windows_looked_up(images, rows, boxes, levels, side, never)
    same = (found.dtype, found.shape, found.stride()) == (
        wanted.dtype,
        wanted.shape,
        wanted.stride(),
    )
    return same and torch.equal(lookup._bits(found), lookup._bits(wanted))


def beyond_32_bits():
    """Read pictures that lie 2**30 bytes apart: the last begins beyond 2**31."""
    apart, count = 2**30, 4
    no_reserve = 0x4000  # of Linux: pages that are never touched cost nothing
    lazily = mmap.mmap(-1, apart * (count - 1) + 600, flags=mmap.MAP_PRIVATE | no_reserve)
    memory = torch.frombuffer(lazily, dtype=torch.uint8)
    values = memory.as_strided((count, 3, 10, 20), (apart, 200, 20, 1))
    values.copy_(picture_bytes(count, 3, 10, 20))
    return is_torchs(values, table(3, torch.float32), 1)


def refused():
    """Return what comes where the kernel is wrong: torch's own values, and never the kernel's."""
    values, levels = picture_bytes(2, 3, 20, 20), table(3, torch.float32)
    from flatout.kernels import lookup as lookup_launch

    right = lookup_launch.look_up
    lookup_launch.look_up = lambda values, levels, out, axes: out.zero_()
    lookup._KEPT.clear()
    try:
        found = [looked_up(values, levels, 1) for _ in range(2)]
    finally:
        lookup_launch.look_up = right
    wanted = lookup._bits(lookup._gathered(values, levels, 1))
    return all(torch.equal(lookup._bits(one), wanted) for one in found)


def crops_of_resident_pictures(mean, std):
    """Cut the way a GPU does: the first batch by torch, the second by the kernel."""
    crops = Crops(side=9, scale=None, mean=mean, std=std)
    images = picture_bytes(6, 20, 30, 3)
    kept = ResidentPictures(None, images, [], np.arange(6))
    places = np.array([5, 0, 0, 3])
    sides = np.full(4, 20), np.full(4, 30)
    found = boxes(crops, uniforms(0, 0, places), *sides)
    lookup._KEPT.clear()
    by_torch, by_kernel = (
        kept._cut_there(torch.from_numpy(places), torch.from_numpy(found), crops) for _ in range(2)
    )
    if False in lookup._KEPT.values() or by_kernel.stride() != by_torch.stride():
        return "not kept"
    return torch.equal(by_torch, by_kernel)


torch.manual_seed(0)
results = dict(wholes())
for dtype in DTYPES:
    results[f"windows {dtype}"] = windows(7, 17, 3, dtype)
results["windows of one"] = windows(1, 40, 3, torch.float32)
results["windows of bytes"] = windows(5, 8, 3, torch.uint8)
results["resident pictures"] = crops_of_resident_pictures((0.5, 0.4, 0.3), (0.2, 0.3, 0.1))
results["resident bytes"] = crops_of_resident_pictures((), ())
results["beyond 32 bits"] = beyond_32_bits()
results["a wrong kernel is not used"] = refused()
print(json.dumps(results))
