"""Train a small CNN on a folder of photographs."""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, default=Path("photos"))
parser.add_argument("--epochs", type=int, default=50)
args = parser.parse_args()


def make_photos(folder, n=64):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(n):
        small = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(small).resize((640, 480), Image.BICUBIC).save(folder / f"{i}.jpg")


class Photos(Dataset):
    def __init__(self, folder):
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        image = Image.open(self.paths[i]).convert("RGB").resize((96, 96), Image.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.FLIP_LEFT_RIGHT)
        x = np.asarray(image, dtype=np.float32) / 255
        x = (x - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        return torch.tensor(x, dtype=torch.float32).permute(2, 0, 1), i % 5


if not args.data.exists():
    make_photos(args.data)
net = nn.Sequential(
    nn.Conv2d(3, 8, 3, stride=4, padding=1),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(8, 5),
)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
train = DataLoader(Photos(args.data), batch_size=8, shuffle=True, drop_last=True)
for _ in range(args.epochs):
    net.train()
    for images, labels in train:
        opt.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        opt.step()
