"""Pickle every function that something put in the place of one of torch's, then train."""

import pickle
import types

import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn

PLACES = (torch, F, nn.init, torch.autograd, torch.cuda, torch.distributed, torch.random)

seen = []
for place in PLACES:
    for name, value in list(vars(place).items()):
        if isinstance(value, types.FunctionType) and "flatout" in value.__code__.co_filename:
            assert pickle.loads(pickle.dumps(value)) is value, (place.__name__, name)
            seen.append(name)
assert {"save", "cross_entropy"} <= set(seen), seen

net = nn.Linear(8, 5000)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(40):
    optimizer.zero_grad()
    F.cross_entropy(net(torch.randn(16, 8)), torch.randint(5000, (16,))).backward()
    optimizer.step()
