"""Train a model of an odd kind: the kind is the argument."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
if kind == "scripted":
    model = torch.jit.script(model)
if kind == "numpy sizes":
    model = nn.Sequential(
        nn.Linear(16, np.int64(32)), nn.ReLU(), nn.Linear(np.int64(32), np.int64(4))
    )
if kind == "lazy":
    model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.Linear(32, 4))
    model(torch.zeros(1, 16))
if kind == "sparse":
    model = nn.Sequential(nn.EmbeddingBag(100, 16, sparse=True), nn.Linear(16, 4))
    data = TensorDataset(torch.randint(0, 100, (512, 8)), data.tensors[1])
if kind == "evaluation mode":
    model.eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(20):
    if kind in ("folds", "another class") and epoch == 10:
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        if kind == "another class":
            model = nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "rebuilt":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (epoch + 1))
    for x, y in DataLoader(data, batch_size=32):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if kind == "diverged":
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
torch.save(model.state_dict(), "model.pt")
