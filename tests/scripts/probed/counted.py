"""Models whose floating-point operations are known by hand; the argument chooses."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

KIND = sys.argv[1]
torch.manual_seed(0)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.block = nn.Linear(16, 16)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        heads = (x * self.scale).view(8, 2, 4, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).reshape(8, 16)


def model():
    if KIND in ("reentrant", "checkpoint"):
        return Checkpointed(KIND == "reentrant")
    if KIND == "conv":
        return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 2, 3), nn.Flatten())
    if KIND == "attention":
        return Attention()
    if KIND == "scale_only":
        return nn.LayerNorm(16)
    if KIND == "recurrent":
        return nn.LSTM(16, 4, batch_first=True)
    return nn.Linear(16, 16)


network = model()
if KIND == "compiled":
    network = torch.compile(network, backend="aot_eager")
optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.rand(64, 16)), batch_size=8)
steps = 0
for _ in range(1000):
    for (x,) in loader:
        with torch.autocast("cpu", torch.bfloat16, enabled=KIND == "autocast"):
            out = network(x)
        loss = (out[0] if isinstance(out, tuple) else out).float().square().mean()
        if KIND == "penalty":
            (slope,) = torch.autograd.grad(loss, network.weight, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()
        if KIND != "accumulate" or steps % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        if KIND == "evaluates":
            network.eval()
            with torch.no_grad():
                network(x)
            network.train()
