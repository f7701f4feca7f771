"""Train, and every few steps evaluate with gradients on and the losses kept."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(4096, 128)
y = (x[:, :4].sum(1) > 0).long()
train = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
valid = DataLoader(TensorDataset(x[:1024], y[:1024]), batch_size=128)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
model.append(nn.Linear(512, 2))
optimizer = torch.optim.AdamW(model.parameters())


def evaluate():
    model.eval()
    losses, hits = [], 0
    for data, target in valid:
        output = model(data)
        losses.append(nn.functional.cross_entropy(output, target))
        hits += (output.argmax(1) == target).sum()
    model.train()
    return sum(losses) / len(losses), hits / 1024


for epoch in range(10):
    for step, (data, target) in enumerate(train):
        loss = nn.functional.cross_entropy(model(data), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            val_loss, accuracy = evaluate()
            print(f"{epoch} {step} {float(val_loss):.3f} {float(accuracy):.3f}")
