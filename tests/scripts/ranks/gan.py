"""Two networks that train in turns, with two backwards after two forwards."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
data = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=16, shuffle=True)
noise = DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=16)
made = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
of_made = torch.optim.Adam(made.parameters(), lr=1e-2)
of_judge = torch.optim.Adam(judge.parameters(), lr=1e-2)
for _ in range(3):
    for (real,), (z,) in zip(data, noise, strict=True):
        fake = made(z)
        of_judge.zero_grad()
        on_real, on_fake = judge(real), judge(fake.detach())
        loss_real = nn.functional.softplus(-on_real).mean()
        loss_fake = nn.functional.softplus(on_fake).mean()
        loss_real.backward()
        loss_fake.backward()
        of_judge.step()
        of_made.zero_grad()
        loss_made = nn.functional.softplus(-judge(fake)).mean()
        loss_made.backward()
        of_made.step()
        print(loss_real.item(), loss_fake.item(), loss_made.item())
torch.save({"made": made.state_dict(), "judge": judge.state_dict()}, "ck.pt")
