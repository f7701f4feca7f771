"""Goes on with the model and the optimizer of a file; the model has a `__call__` of its own.

It asked a part of itself for a shape when it was made.
"""

import io

import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        width = self.features(torch.zeros(1, 1, 8, 8)).shape[1]
        self.head = nn.Linear(width, 2)

    def __call__(self, batch):
        return super().__call__(batch["x"], module="train")

    def forward(self, x, *, module):
        return self.head(self.features(x))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with io.BytesIO() as file:
    torch.save((model, optimizer), file)
    file.seek(0)
    model, optimizer = torch.load(file, weights_only=False)
loader = DataLoader([{"x": torch.randn(1, 8, 8)} for _ in range(96)], batch_size=6)
for _ in range(100_000):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
