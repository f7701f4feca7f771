"""Repeated blocks, a schedule, evaluation, saving, and going on from a checkpoint."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
first = 0
if Path("ck.pt").exists():
    saved = torch.load("ck.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    torch.set_rng_state(saved["rng"])
    first = saved["epoch"] + 1
for epoch in range(first, first + int(sys.argv[1])):
    for x, y in DataLoader(data, batch_size=12, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", epoch, loss.item())
    schedule.step()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "epoch": epoch,
        },
        "ck.pt",
    )
    assert torch.load("ck.pt", weights_only=True)["epoch"] == epoch
