"""Train a small denoising network on noised pictures, with an average of its weights."""

import copy
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH, SIDE = (8, 2, 16) if "tiny" in sys.argv else (48, 16, 32)
STEPS = 1000
torch.manual_seed(0)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(
            nn.GroupNorm(8, WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, WIDTH, 3, 1, 1)
        )
        self.time = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Sequential(
            nn.GroupNorm(8, WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, WIDTH, 3, 1, 1)
        )

    def forward(self, x, time):
        return x + self.two(self.one(x) + self.time(time)[:, :, None, None])


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(STEPS, WIDTH)
        self.first, self.last = nn.Conv2d(3, WIDTH, 3, 1, 1), nn.Conv2d(WIDTH, 3, 3, 1, 1)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x, time):
        x, time = self.first(x), self.embed(time)
        for block in self.blocks:
            x = block(x, time)
        return self.last(x)


model = Denoiser()
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
kept = torch.linspace(0.9999, 0.98, STEPS).cumprod(0)
loader = DataLoader(TensorDataset(torch.randn(1024, 3, SIDE, SIDE)), BATCH, shuffle=True)
for _ in range(1000):
    for (pictures,) in loader:
        time = torch.randint(0, STEPS, (len(pictures),))
        noise = torch.randn_like(pictures)
        share = kept[time][:, None, None, None]
        loss = (model(share.sqrt() * pictures + (1 - share).sqrt() * noise, time) - noise).square()
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.001)
