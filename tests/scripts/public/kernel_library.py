"""Train a layer, after libraries have looked at torch as they do when they are imported."""

import torch
from torch import nn

if torch.cuda.is_available():
    current_raw_stream = torch._C._cuda_getCurrentRawStream
print(torch.__config__.show())
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(32, 16)).square().mean().backward()
    optimizer.step()
