"""Read a loss once an epoch, not in each step: .item() makes the host wait for the device.

.detach() alone copies nothing and waits for nothing; without it a running sum keeps every step's
graph.

    python examples/articles/no_sync.py
    flatout check examples/articles/no_sync.py
    flatout measure train.py     # names the lines that make the host wait
"""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total, read = torch.zeros(()), []
for _ in range(20):
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.detach()  # stays on the device
    read.append(loss.item())  # what the tip is about: once a step, for comparison only
mean = (total / 20).item()  # one wait
same = abs(mean - sum(read) / 20) < 1e-6
print(
    f"result: one .item() gives the mean of 20: {same}; "
    f"the sum keeps a graph: {total.requires_grad}"
)
