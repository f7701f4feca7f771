"""Fit a curve with a tiny network, one call after the other."""

import torch

x = torch.linspace(-3.14, 3.14, 64).unsqueeze(1)
y = torch.sin(x)
layers = []
for _ in range(20):
    layers += [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8)]
model = torch.nn.Sequential(torch.nn.Linear(1, 8), *layers, torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for t in range(20_000):
    y_pred = model(x)
    loss = torch.nn.functional.mse_loss(y_pred, y)
    if t % 1000 == 999:
        print(t, loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
