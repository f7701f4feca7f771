"""The batches of a step are drawn before the first of them is worked on, and their samples counted.

The last group of an epoch has fewer, and its last batch is smaller.
"""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(12)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.randn(54, 6), torch.randint(4, (54,)))
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(3):
    batches = iter(DataLoader(data, batch_size=8, shuffle=True))
    while group := list(itertools.islice(batches, 3)):
        samples = sum(len(y) for _, y in group)
        for x, y in group:
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / samples
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        print("loss", nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).item())
torch.save(model.state_dict(), "ck.pt")
