import sys

import torch
from torch import nn

other = sys.argv[1] if len(sys.argv) > 1 else "cuda"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
small, large = nn.Linear(64, 8).to(other), nn.Linear(64, 4096).to(device)
first = torch.optim.Adam(small.parameters())
second = torch.optim.Adam(large.parameters())
for _ in range(9):
    for model, optimizer in ((small, first), (large, second)):
        optimizer.zero_grad()
        model(torch.randn(16, 64, device=model.weight.device)).square().mean().backward()
        optimizer.step()
