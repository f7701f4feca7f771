"""Train a small network on data that cost something; `--free` gives ready batches from memory.

Scenarios: `sleep` waits for each sample as for a slow disk, `decode` unpacks and normalises it in
the training process, `workers` does the same in two processes.
"""

import argparse
import itertools
import time
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 64
BATCH = 16
SLEEP_S = 0.003
PASSES = 24
"""How often a sample is unpacked: together about as long as its part of a training step."""


class Images(Dataset):
    """Packed noise images that are unpacked on every access."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario
        generator = np.random.default_rng(0)
        pixels = generator.integers(0, 64, (32, 3, SIDE, SIDE), dtype=np.uint8)
        self.packed = [zlib.compress(image.tobytes(), 1) for image in pixels]

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        packed = self.packed[index % len(self.packed)]
        if self.scenario == "sleep":
            time.sleep(SLEEP_S)
            return torch.zeros(3, SIDE, SIDE), index % 10
        for _ in range(PASSES):
            pixels = np.frombuffer(zlib.decompress(packed), dtype=np.uint8)
        image = pixels.reshape(3, SIDE, SIDE).astype(np.float32) / 255 - 0.5
        return torch.from_numpy(image), index % 10


def network() -> nn.Module:
    """Return a network whose step takes about as long as its data."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def main() -> None:
    """Train until something ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=("sleep", "decode", "workers"))
    parser.add_argument("--free", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    workers = 2 if args.scenario == "workers" else 0
    loader = DataLoader(
        Images(args.scenario), BATCH, shuffle=True, num_workers=0 if args.free else workers
    )
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = itertools.cycle(list(itertools.islice(loader, 8))) if args.free else None
    for _ in range(100):
        for images, labels in batches or loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
