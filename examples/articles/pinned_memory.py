"""Page-locked batches, copied while the device works: pin_memory=True needs non_blocking=True to
overlap.

python examples/articles/pinned_memory.py flatout check examples/articles/pinned_memory.py flatout
tune --only pinned_memory,device_prefetch train.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,)))
loader = DataLoader(
    data, batch_size=32, pin_memory=device.type == "cuda"
)  # on a CPU nothing is copied

model = nn.Linear(64, 10).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, labels in loader:
    inputs = inputs.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
pinned = next(iter(loader))[0].is_pinned()
print(
    "result: batches are page-locked only where a GPU takes them: "
    f"{pinned == (device.type == 'cuda')}"
)
