"""Train a small vision transformer in a loop of accelerate, with accumulation."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, LAYERS, BATCH = (32, 1, 2) if "tiny" in sys.argv else (192, 4, 16)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True, dropout=0.0
        )
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        return self.head(self.body(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = Transformer()
data = TensorDataset(torch.randn(2048, 3, 32, 32), torch.randint(0, 10, (2048,)))
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    DataLoader(data, batch_size=BATCH, shuffle=True),
)
for _ in range(1000):
    for pictures, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(pictures), labels))
            optimizer.step()
            optimizer.zero_grad()
