"""Train next to a data set of many small Python objects, making new ones in every step."""

import torch
from torch import nn

torch.manual_seed(0)
samples = [{"number": n, "words": [n, (n,)]} for n in range(200_000)]
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = []
for step in range(60):
    kept.append([{"step": step, "word": [n]} for n in range(3_000)])
    x = torch.tensor([[float(samples[n]["number"] % 7)] * 8 for n in range(64)])
    loss = (model(x) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
