import numpy as np
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
for layer in (model[0], model[2]):
    drawn = np.random.normal(0, 0.02, tuple(layer.weight.shape)).astype(np.float32)
    layer.weight.data = torch.tensor(drawn, requires_grad=True)
model = model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _step in range(4):
    loss = model(torch.randn(32, 64).to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
