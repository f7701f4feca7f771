"""Slower with four: many weights, few samples, and GPUs that are joined by PCIe.

    python examples/parallel/slower_with_four.py
    flatout plan --gpu rtx4090 --gpus 4 examples/parallel/slower_with_four.py

Each step computes for 8 samples and sends the gradients of 13 million weights: over PCIe that
takes longer than the computing that three more GPUs save. A larger batch, or gradients that are
exchanged every few steps (accumulation), changes the answer; more GPUs do not.
"""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 2560), nn.ReLU(), nn.Linear(2560, 100)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
samples = torch.utils.data.TensorDataset(torch.randn(64, 512), torch.randint(0, 100, (64,)))
loader = torch.utils.data.DataLoader(samples, batch_size=8)

for inputs, labels in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
