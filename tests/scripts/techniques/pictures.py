"""Train a tiny convolutional network on JPEG files that the script makes up.

python pictures.py [--workers 2]
"""

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

COUNT, SIZE = 64, 64
MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.2, 0.2])


def write_pictures(folder):
    """Write pictures of one colour each, with some grain, and return their paths."""
    generator = np.random.default_rng(0)
    paths = []
    for number in range(COUNT):
        colour = np.eye(3)[number % 3] * 160 + 40
        pixels = colour + generator.normal(0, 20, (96, 128, 3))
        paths.append(folder / f"{number:02}.jpg")
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths


class Pictures(Dataset):
    """Crop, resize, flip and normalise as many scripts do, each step by hand."""

    def __init__(self, paths, size=SIZE):
        self.paths, self.size = paths, size

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB")
        side = random.randint(40, 80)
        left, top = random.randint(0, 128 - side), random.randint(0, 96 - side)
        box = (left, top, left + side, top + side)
        image = image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        if random.random() < 0.5:
            pixels = pixels.flip(-1)
        return (pixels - MEAN[:, None, None]) / STD[:, None, None], index % 3


class Net(nn.Module):
    """Three convolutions and a head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.third = nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = functional.relu(self.second(functional.relu(self.first(x))))
        return self.head(functional.relu(self.norm(self.third(x))).mean((2, 3)))


def main():
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--size", type=int, default=SIZE)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        data = Pictures(write_pictures(Path(folder)), args.size)
        loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=args.workers)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for epoch in range(args.epochs):
            for pixels, labels in loader:
                loss = functional.cross_entropy(model(pixels), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
