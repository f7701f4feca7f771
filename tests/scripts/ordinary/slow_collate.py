"""Train on signals that a collate function filters in plain Python."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Signals(Dataset):
    def __len__(self):
        return 3000

    def __getitem__(self, i):
        return [math.sin(i + t / 7) for t in range(400)], i % 3


def smooth(signal, k=5):
    return [sum(signal[max(0, t - k) : t + 1]) / (k + 1) for t in range(len(signal))]


def collate(rows):
    signals = [smooth(signal) for signal, _ in rows]
    return torch.tensor(signals).unsqueeze(1), torch.tensor([label for _, label in rows])


model = nn.Sequential(
    nn.Conv1d(1, 16, 9, stride=4), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten()
)
model.append(nn.Linear(64, 3))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for _ in range(5):
    for signal, label in DataLoader(Signals(), batch_size=32, shuffle=True, collate_fn=collate):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(signal), label)
        loss.backward()
        optimizer.step()
