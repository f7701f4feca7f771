"""A small model: stay on one GPU.

    python examples/parallel/small_model.py
    flatout plan --gpu h100 --gpus 4 examples/parallel/small_model.py

The step is so short that a GPU spends it on starting operators. Three more GPUs start the same
operators for a part of the batch each, and exchange the gradients on top.
"""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)
optimizer = torch.optim.AdamW(model.parameters())
samples = torch.utils.data.TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
loader = torch.utils.data.DataLoader(samples, batch_size=64, shuffle=True)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
