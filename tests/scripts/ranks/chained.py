"""Models that are called one after the other on batches of the script's own, and a penalty.

The penalty is on the gradient of what the second model says of the first one's output: a gradient
of gradients goes through both.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
encoder = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
head = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))
parameters = [*encoder.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)
held_out = TensorDataset(torch.randn(12, 6), torch.randint(4, (12,)))


def evaluate():
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(head(encoder(x)), y).item()
            for x, y in DataLoader(held_out, 4, shuffle=True)
        ]
    return sum(losses)


for step in range(12):
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    features = encoder(x)
    scores = head(features)
    loss = nn.functional.cross_entropy(scores, y)
    (slope,) = torch.autograd.grad(scores.square().sum(), features, create_graph=True)
    loss = loss + 0.01 * slope.square().sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
    if step % 4 == 0:
        print("held out", evaluate())
torch.save({"encoder": encoder.state_dict(), "head": head.state_dict()}, "ck.pt")
