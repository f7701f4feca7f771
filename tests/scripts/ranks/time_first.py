"""A recurrent network whose first dimension is time, on batches of the script's own."""

import torch
from torch import nn

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
recurrent, head = nn.LSTM(5, 16), nn.Linear(16, 3)
optimizer = torch.optim.SGD([*recurrent.parameters(), *head.parameters()], lr=0.1)
for _ in range(8):
    x = torch.randn(10, 8, 5)
    wanted = x[..., :3].cumsum(0)
    loss = (head(recurrent(x)[0]) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
torch.save({"recurrent": recurrent.state_dict(), "head": head.state_dict()}, "ck.pt")
