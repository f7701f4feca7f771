"""Accumulate gradients over micro-batches, with a warm-up for the larger batch.

The losses of the parts have to be divided by their number: backward adds gradients up, it does not
average them.

    python examples/articles/accumulation.py
    flatout tune --only microbatching train.py
    flatout survey train.py      # accumulation, and accumulation with warm-up, measured
"""

import torch
from torch import nn

PARTS = 4
torch.manual_seed(0)
model = nn.Linear(16, 1)
inputs, wanted = torch.randn(32, 16), torch.randn(32, 1)

nn.functional.mse_loss(model(inputs), wanted).backward()
whole = model.weight.grad.clone()
model.zero_grad()
for x, y in zip(inputs.chunk(PARTS), wanted.chunk(PARTS), strict=True):
    (nn.functional.mse_loss(model(x), y) / PARTS).backward()
same = torch.allclose(model.weight.grad, whole, atol=1e-6)

optimizer = torch.optim.SGD(
    model.parameters(), lr=0.4
)  # 4 times 0.1, as the batch: the linear rule
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=5)
rates = []
for _ in range(6):
    rates.append(optimizer.param_groups[0]["lr"])
    optimizer.step()
    warm_up.step()
print(
    f"result: the gradient is the whole batch's: {same}; "
    f"the rate goes from {rates[0]:.1f} to {rates[-1]:.1f}"
)
