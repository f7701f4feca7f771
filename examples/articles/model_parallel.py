"""A model in two stages on two devices, and a pipeline of micro-batches: the same gradients as in
one piece.

The stages of a plain split wait for each other. A pipeline keeps both busy;
torch.distributed.pipelining starts one process a stage. Here both devices are the CPU, so that it
runs anywhere.

    python examples/articles/model_parallel.py
    flatout plan --gpus 2 train.py  # whether it fits one device: mostly the better answer
"""

import torch
from torch import nn

count = torch.cuda.device_count()
devices = [torch.device("cuda", i) if count > 1 else torch.device("cpu") for i in range(2)]
torch.manual_seed(0)
first, second = nn.Linear(16, 32).to(devices[0]), nn.Linear(32, 1).to(devices[1])


def loss_of(batch):
    middle = torch.relu(first(batch.to(devices[0])))
    return second(middle.to(devices[1])).square().mean()


batch = torch.randn(32, 16)
loss_of(batch).backward()
whole = first.weight.grad.clone()
first.zero_grad(), second.zero_grad()
for part in batch.chunk(4):  # what a pipeline sends through its stages
    (loss_of(part) / 4).backward()
print(
    "result: the gradient is that of one piece: "
    f"{torch.allclose(first.weight.grad, whole, atol=1e-6)}"
)
