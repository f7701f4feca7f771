"""Fit a wide network with embeddings to a table of numbers and categories."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, WIDTH, BATCH = (2_000, 16, 32) if "tiny" in sys.argv else (200_000, 512, 256)
torch.manual_seed(0)
numbers, kinds = torch.randn(ROWS, 24), torch.randint(0, 50, (ROWS, 8))
target = numbers[:, :4].sum(1) + 0.1 * kinds[:, 0].float()
loader = DataLoader(TensorDataset(numbers, kinds, target), batch_size=BATCH, shuffle=True)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(50, 8) for _ in range(8))
        self.body = nn.Sequential(
            nn.Linear(24 + 64, WIDTH),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, numbers, kinds):
        parts = [embed(kinds[:, column]) for column, embed in enumerate(self.embed)]
        return self.body(torch.cat([numbers, *parts], 1)).squeeze(1)


model = Table()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(1000):
    for numbers, kinds, target in loader:
        loss = nn.functional.mse_loss(model(numbers, kinds), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
