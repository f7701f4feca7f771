"""Find the batch size by samples a second, not by what fits: double it until doubling stops paying.

python examples/articles/batch_size.py flatout plan --gpu h100 --fit train.py # what fits, before
anything runs flatout tune --numerics training --only batch_size train.py # what pays; the learning
rate follows
"""

import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rates = {}
for batch in (4, 16, 64, 256):
    inputs, labels = torch.randn(batch, 64), torch.randint(0, 10, (batch,))
    times = []
    for _ in range(12):
        begun = time.perf_counter()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - begun)
    rates[batch] = batch / sorted(times)[len(times) // 2]
print(
    f"result: samples a second of {len(rates)} sizes were measured; "
    f"the largest is faster than the smallest: {rates[256] > rates[4]}"
)
