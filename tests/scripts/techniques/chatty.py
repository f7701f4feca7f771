"""A loop as in the tutorials: it adds losses up, prints them, and branches on one."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(400, 8), torch.randn(400, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)


def train(epoch):
    total, count = 0.0, 0
    running = 0.0
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
        count += len(x)
        value = loss.item()
        running += value
        if step % 5 == 0:
            mean = running / (step + 1)
            print(f"epoch {epoch} step {step} loss {loss.item():.4f} mean {mean:.4f}")
            print("plain", round(loss.item(), 2), step, round(value, 3), f"{loss:.3e}", flush=True)
            running = 0.0
        if loss.item() > 1e6:
            break
    return total / count


for epoch in range(3):
    mean = train(epoch)
    print("epoch", epoch, type(mean).__name__, mean)
    sys.stdout.write(f"direct {mean:.3f}\n")
