"""What a loop calls is compiled: the `loss`, the optimizer's `step`, or the `whole` of both.

By Dynamo alone, as models and hooks are not called in what it traced, whatever compiles that.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PART = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3)
)
loader = DataLoader(
    TensorDataset(torch.randn(96, 8), torch.randint(3, (96,))), batch_size=6, shuffle=True
)
optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3))


def loss_of(x, y):
    return nn.functional.cross_entropy(model(x), y)


def update():
    optimizer.step()


def train(x, y):
    optimizer.zero_grad()
    loss = loss_of(x, y)
    loss.backward()
    update()
    return loss.detach()


compiled = torch.compile(backend="eager")
if PART == "loss":
    loss_of = compiled(loss_of)
elif PART == "step":
    update = compiled(update)
else:
    train = compiled(train)
for _ in range(100_000):
    for x, y in loader:
        train(x, y)
