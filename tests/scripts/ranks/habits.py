"""A loop that clips a list of its own, lets a layer rest, and writes to its weights.

It looks at parts of the model, too, before a step and after it.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.uses = 2

    def encode(self, x):
        return self.blocks[0](torch.tanh(self.first(x)))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks[: self.uses]:
            x = x + torch.tanh(block(x))
        return self.last(x)


model = Net()
trained = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.SGD(trained, lr=0.5, momentum=0.9, weight_decay=0.1)
plan = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
data = TensorDataset(torch.randn(60, 8), torch.randn(60, 1))
for step, (x, y) in enumerate(DataLoader(data, batch_size=10)):
    model.uses = 1 if step > 2 else 2  # then the second block gets no gradient, and no step
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(trained, 0.1)
    looks = []
    for act in (lambda: None, opt.step, plan.step):
        act()
        with torch.no_grad():
            looks += [model.encode(x[:2]).sum().item(), model.last(x[:2]).sum().item()]
    print("loss", loss.item(), float(norm), *looks)
    if step == 3:
        with torch.no_grad():
            model(x[:2])
            for p in model.parameters():
                p.mul_(0.5)
torch.save({"m": model.state_dict(), "o": opt.state_dict()}, "ck.pt")
