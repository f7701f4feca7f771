"""Train a small network on random crops of photographs, one folder per class.

    python naive_photographs.py --data photographs

An ordinary script: it knows nothing of flatout.
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Photographs(Dataset):
    """Random crops of the photographs below a folder, labelled by their folder's name."""

    def __init__(self, folder, side):
        self.paths = sorted(folder.glob("*/*.jpg"))
        self.classes = sorted({path.parent.name for path in self.paths})
        self.side = side

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        image = Image.open(path).convert("RGB")
        width, height = image.size
        part = random.uniform(0.3, 1.0) ** 0.5
        w, h = width * part, height * part
        x, y = random.uniform(0, width - w), random.uniform(0, height - h)
        image = image.crop((int(x), int(y), int(x + w), int(y + h)))
        image = image.resize((self.side, self.side), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1)
        return pixels / 127.5 - 1, self.classes.index(path.parent.name)


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)

    data = Photographs(args.data, args.side)
    loader = DataLoader(data, args.batch_size, shuffle=True, num_workers=args.workers)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4, padding=3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, len(data.classes)),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for epoch in range(args.epochs):
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
