"""Draw batches of photographs as a training would, and print what they cost.

    python feed.py --data photographs --workers 2

An ordinary script: it knows nothing of flatout. `--as-bytes` ends the measurement where a device
would take over: what travels as bytes is not scaled on the CPU.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)


def random_resized_crop(image, size):
    """Cut a random part of 8-100 % of the area and scale it to a square."""
    width, height = image.size
    side = (width * height * random.uniform(0.08, 1.0)) ** 0.5
    aspect = random.uniform(3 / 4, 4 / 3) ** 0.5
    w, h = min(width, side * aspect), min(height, side / aspect)
    x, y = random.uniform(0, width - w), random.uniform(0, height - h)
    box = (x, y, x + w, y + h)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


class Photographs(Dataset):
    """Photographs below a folder, labelled by their folder's name, some epochs in one."""

    def __init__(self, folder, size, repeats):
        paths = sorted(folder.glob("*/*.jpg"))
        self.classes = sorted({path.parent.name for path in paths})
        self.paths, self.size = paths * repeats, size

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        image = random_resized_crop(Image.open(path).convert("RGB"), self.size)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = (np.asarray(image, dtype=np.float32) / 255 - MEAN) / STD
        label = self.classes.index(path.parent.name)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), label


def processes():
    """Return this process and those below it."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def cpu_s():
    """Return the processor time of all of them."""
    times = [process.cpu_times() for process in processes()]
    return sum(t.user + t.system for t in times)


def chain(function, inner="__wrapped__"):
    """Return the kinds of a function and of what it is wrapped around."""
    names = []
    while function is not None:
        names.append(getattr(function, "name", type(function).__name__))
        function = getattr(function, inner, None)
    return names


def main():
    """Draw the batches."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--as-bytes", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)

    images = len(list(args.data.glob("*/*.jpg")))
    # More than is drawn, so that the workers are as busy at the end as at the beginning.
    wanted = (args.batches + args.warmup + 16) * args.batch_size
    dataset = Photographs(args.data, args.size, -(-wanted // images))
    loader = DataLoader(dataset, args.batch_size, shuffle=True, num_workers=args.workers)

    began = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first_s = time.perf_counter() - began
    transport = sys.modules.get("flatout.data.byte_batches.transport")
    if args.as_bytes and transport is not None:
        transport.unpack = lambda batch, device=None: batch
    for _ in range(args.warmup):
        next(batches)
    began, cpu_began = time.perf_counter(), cpu_s()
    for _ in range(args.batches):
        next(batches)
    seconds, cpu = time.perf_counter() - began, cpu_s() - cpu_began
    drawn = args.batches * args.batch_size
    memory = sum(process.memory_full_info().pss for process in processes())
    result = {
        "images_per_s": drawn / seconds,
        "cpu_ms": 1e3 * cpu / drawn,
        "first_s": first_s,
        "pss_mb": memory / 1e6,
        "hooks": [*chain(loader.collate_fn), *chain(loader.worker_init_fn, "then")],
    }
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
