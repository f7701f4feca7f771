"""A loop like many: shuffled batches of which the last is smaller, clipping, evaluation."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.randn(83, 8), torch.randint(0, 3, (83,)))
val = TensorDataset(torch.randn(40, 8), torch.randint(0, 3, (40,)))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
scale = torch.ones(1, requires_grad=True)  # belongs to no model
opt = torch.optim.AdamW([*model.parameters(), scale], lr=1e-2)
loader = DataLoader(data, batch_size=10, shuffle=True)
vloader = DataLoader(val, batch_size=16)
for _ in range(3):
    model.train()
    for x, y in loader:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x) * scale, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print("loss", loss.item())
    model.eval()
    with torch.no_grad():
        ok = sum((model(x).argmax(1) == y).sum().item() for x, y in vloader)
    print("val", ok)
    torch.save({"m": model.state_dict(), "o": opt.state_dict()}, "ck.pt")
