"""Leaves exactly 400,000 bytes behind in every step, and the graph of a loss in `total`."""

import torch
import torch.nn as nn

net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(net.parameters())
history = []
total = 0.0
for _ in range(60):
    x, y = torch.randn(32, 64), torch.randint(0, 8, (32,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    history.append(torch.zeros(100_000))  # the leak
    total = total + loss.detach() * 0 + loss  # the graph
