"""GradScaler with clipping, and an evaluation that uses neither eval() nor no_grad()."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
data = torch.utils.data.TensorDataset(torch.randn(1024, 16), torch.randint(0, 3, (1024,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
for _ in range(100):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
