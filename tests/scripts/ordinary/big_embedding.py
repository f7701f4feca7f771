"""Recommend items: large tables, few rows of them in each batch, and Adam over all of them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

USERS, ITEMS, DIM = 60_000, 30_000, 64


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM)
        self.item = nn.Embedding(ITEMS, DIM)

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(1)


n = 20_000
clicks = TensorDataset(
    torch.randint(USERS, (n,)), torch.randint(ITEMS, (n,)), torch.randint(2, (n,)).float()
)
loader = DataLoader(clicks, batch_size=64, shuffle=True)
net = TwoTower()
adam = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=False)
for _ in range(5):
    for user, item, label in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(net(user, item), label)
        adam.zero_grad()
        loss.backward()
        adam.step()
