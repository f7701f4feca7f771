"""Trainings one after the other: splits drawn between epochs, layers that thaw, a new head."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

torch.set_default_dtype(torch.float64)
generator = torch.Generator().manual_seed(5)
data = TensorDataset(
    torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator)
)


def train(model, optimizer, samples):
    for step, (x, y) in enumerate(DataLoader(samples, batch_size=5, shuffle=True)):
        if step == 3:
            model[0].requires_grad_(True)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item())


for seed in range(2):
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples, held_out = random_split(data, [30, 10])
    for _ in range(2):
        train(model, optimizer, Subset(samples, random.sample(range(30), 20)))
        model[0].requires_grad_(False)
    with torch.no_grad():
        for x, y in DataLoader(held_out, batch_size=5):
            print("held out", nn.functional.cross_entropy(model(x), y).item())
model[2] = nn.Linear(8, 3)
train(model, torch.optim.SGD(model.parameters(), lr=0.1), Subset(data, torch.randperm(40)[:20]))
torch.save({"model": model.state_dict()}, "ck.pt")
