"""A script that trains nothing."""

import torch

model = torch.nn.Linear(4, 4)
print(model(torch.zeros(1, 4)).sum().item())
