"""Batches as people make them: several loaders at once, tensor dicts, lists of images."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

how = sys.argv[1]


class TensorDict:
    """A class with `.to` and `.keys`, neither a mapping nor a tensor."""

    def __init__(self, **tensors):
        self._tensors = tensors

    def keys(self):
        return self._tensors.keys()

    def values(self):
        return self._tensors.values()

    def __getitem__(self, name):
        return self._tensors[name]

    def to(self, device):
        return TensorDict(**{name: x.to(device) for name, x in self._tensors.items()})


def tensor_dict(rows):
    return TensorDict(x=torch.stack([row[0] for row in rows]))


def images(rows):
    return [torch.zeros(3, 4 + index, 5) for index, _ in enumerate(rows)], [0] * len(rows)


data = TensorDataset(torch.randn(48, 8))
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
collate = {"tensor_dict": tensor_dict, "images": images}.get(how)
loader = DataLoader(data, batch_size=6, collate_fn=collate)
unlabelled = DataLoader(data, batch_size=12)


def draws():
    if how == "two_loaders":
        for (x,), (u,) in zip(loader, unlabelled, strict=False):
            yield torch.cat([x, u])
    elif how == "tensor_dict":
        for batch in loader:
            yield batch.to("cpu")["x"]
    else:
        for pictures, _ in loader:
            yield torch.stack([picture.mean() for picture in pictures]).repeat(8, 1).T


for _ in range(100_000):
    for x in draws():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
