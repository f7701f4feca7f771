"""Train one thing; what it multiplies is known."""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

kind = sys.argv[1]
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.second = nn.Linear(24, 5)
        self.conv = nn.Conv2d(1, 2, 3)

    def forward(self, x):
        if kind == "conv":
            return self.conv(x.view(-1, 1, 4, 4)).flatten(1)
        if kind == "attention":
            q = self.first(x)[:, :16].view(2, 1, -1, 16)
            return functional.scaled_dot_product_attention(q, q, q)
        if kind == "checkpoint":
            hidden = checkpoint(lambda y: self.first(y).relu(), x, use_reentrant=False)
        else:
            hidden = self.first(x)
        return self.second(hidden.relu())


model = Model()
if kind == "compiled":
    model.compile(backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _step in range(100):
    for _micro in range(2 if kind == "accumulate" else 1):
        x = torch.randn(8, 16, requires_grad=kind == "checkpoint")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            loss = model(x).float().square().mean()
        loss.backward()
    with torch.no_grad():
        model.second(torch.randn(3, 24))  # an evaluation of a part: no product of the step
    optimizer.step()
    optimizer.zero_grad()
