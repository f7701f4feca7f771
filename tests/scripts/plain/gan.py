"""Two optimizers that alternate, one batch a step."""

import torch
from torch import nn

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
D = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-4)
opt_g = torch.optim.Adam(G.parameters(), lr=1e-4)
loss_of = nn.BCEWithLogitsLoss()
real = torch.randn(512, 16)
loader = torch.utils.data.DataLoader(real, batch_size=16, shuffle=True)
for _ in range(200):
    for batch in loader:
        ones, zeros = torch.ones(len(batch), 1), torch.zeros(len(batch), 1)
        opt_d.zero_grad()
        loss_of(D(batch), ones).backward()
        fake = G(torch.randn(len(batch), 8))
        loss_of(D(fake.detach()), zeros).backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_of(D(fake), ones).backward()
        opt_g.step()
