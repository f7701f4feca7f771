"""A plain loop with evaluation, checkpoints and a log file, for tests of the hook points."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1_000)
parser.add_argument("--width", type=int, default=64)
args = parser.parse_args()

torch.manual_seed(1)
data = TensorDataset(torch.randn(96, 32), torch.randint(0, 4, (96,)))
train = DataLoader(data, batch_size=8, shuffle=True)
test = DataLoader(data, batch_size=16)
model = nn.Sequential(nn.Linear(32, args.width), nn.ReLU(), nn.Linear(args.width, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(args.epochs):
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
    torch.save(model.state_dict(), "checkpoint.pt")
    with open("log.txt", "a") as log:
        log.write(f"{epoch} {correct}\n")
