"""No DataLoader: the script makes its own batches, and there is no optimizer class either."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
by_hand = "--by-hand" in sys.argv
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
optimizer = None if by_hand else torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 64, (10_000,))


def get_batch():
    starts = torch.randint(0, 9_000, (4,))
    x = torch.stack([tokens[i : i + 32] for i in starts])
    return x, torch.stack([tokens[i + 1 : i + 33] for i in starts])


for _ in range(5_000):
    x, y = get_batch()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    if optimizer is None:
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.1)
    else:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
