"""Classify small pictures that lie in memory as a NumPy array, augmented one by one."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, BATCH = (8, 8) if "tiny" in sys.argv else (48, 64)


class Pictures(Dataset):
    def __init__(self):
        dice = np.random.default_rng(0)
        self.pictures = dice.integers(0, 256, (4096, 32, 32, 3), dtype=np.uint8)
        self.labels = dice.integers(0, 10, 4096)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        picture = torch.from_numpy(self.pictures[number]).permute(2, 0, 1).float() / 255
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return (picture - 0.5) / 0.25, int(self.labels[number])


def block(inner, outer, stride):
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()
    )


torch.manual_seed(0)
model = nn.Sequential(
    block(3, WIDTH, 1),
    block(WIDTH, 2 * WIDTH, 2),
    block(2 * WIDTH, 4 * WIDTH, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(4 * WIDTH, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
loss_of = nn.CrossEntropyLoss()
for _ in range(1000):
    for pictures, labels in DataLoader(Pictures(), batch_size=BATCH, shuffle=True):
        optimizer.zero_grad()
        loss_of(model(pictures), labels).backward()
        optimizer.step()
