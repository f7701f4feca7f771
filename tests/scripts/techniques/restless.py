"""Train a model that reads a number of its own which changes in every step."""

import torch
from torch import nn

torch.manual_seed(0)


class Restless(nn.Module):
    """Compiled code is made for one value of `step`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.name = "step 0"

    def forward(self, x):
        return self.layer(x) * len(self.name) + (1 if self.name.endswith("7") else 0)


model = Restless()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(40):
    model.name = f"step {step}"
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
