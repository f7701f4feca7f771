"""The training that scripts of rules with a fix are made of: `tests/rules/test_same_losses.py`."""

BASE = """\
import os

import torch
import torch.utils.checkpoint
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
table = torch.randn(64, 8)
loader = DataLoader(TensorDataset(torch.arange(64), torch.randn(64, 1)), 8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, total = [], 0.0
for epoch in range(3):
    model.train()
    for rows, y in loader:
        x = table[rows]
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
FORWARD = "        loss = mse_loss(model(x), y)\n"
READ = "        losses.append(loss.item())\n"
EVALUATION = "    model.eval()\n    for rows, y in loader:\n        model(table[rows])\n"
CHECKPOINT = "torch.utils.checkpoint.checkpoint"
SAVED = 'PATH = "begin.pt"\ntorch.save(model.state_dict(), PATH)\nmodel.load_state_dict('
RANK = """\
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
"""
LEFT = "torch.distributed.destroy_process_group()\n"
MODEL = (
    "model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))\n"
)
COMPILED = """\
class Net(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x)


model = Net(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
model = torch.compile(model, backend="eager")
torch.save(model.state_dict(), "compiled.pt")
"""
FILES = """\
class Files(TensorDataset):
    def __getitem__(self, index):
        with open(__file__, "rb") as file:
            file.read()
        return super().__getitem__(index)


"""
