"""Embeddings whose gradients are sparse, next to layers whose gradients are not."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(13)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.randint(50, (40, 5)), torch.randn(40, 1))
bags, head = nn.EmbeddingBag(50, 8, mode="mean", sparse=True), nn.Linear(8, 1)
model = nn.Sequential(bags, nn.Tanh(), head)
optimizers = [torch.optim.SparseAdam(bags.parameters()), torch.optim.Adam(head.parameters())]
for x, y in DataLoader(data, batch_size=8, shuffle=True):
    loss = nn.functional.mse_loss(model(x), y)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    print("loss", loss.item())
torch.save({"model": model.state_dict(), "o": optimizers[0].state_dict()}, "ck.pt")
