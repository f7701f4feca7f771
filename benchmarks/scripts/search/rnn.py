"""Predict the next character with an LSTM, gradients clipped."""

import sys

import torch
from torch import nn

WIDTH, LENGTH, BATCH = (32, 16, 4) if "tiny" in sys.argv else (256, 64, 32)
torch.manual_seed(0)
text = torch.randint(0, 96, (200_000,))


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(WIDTH, 96)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


model = Characters()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(100_000):
    starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,))
    x = torch.stack([text[start : start + LENGTH] for start in starts])
    y = torch.stack([text[start + 1 : start + LENGTH + 1] for start in starts])
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
