"""Batches of many kinds, and scripts that are rough with them; the argument chooses."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

KIND = sys.argv[1]


class Rows(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        if KIND == "no_worker" and get_worker_info() is not None:
            raise RuntimeError("a worker was started")
        return {"x": torch.full((16,), 255.0), "y": index % 3}


class Stream(IterableDataset):
    """Counts what it was asked for: a replay asks for a few batches only."""

    def __iter__(self):
        for number in range(8 * 30):
            if KIND == "short_stream" and number == 8 * 12:
                return
            if KIND == "endless" and number > 8 * 20:
                raise RuntimeError("the data set was asked for more than it has")
            yield {"x": torch.full((16,), 255.0), "y": number % 3}


class Pair:
    def __init__(self, rows):
        self.x = torch.stack([row["x"] for row in rows])
        self.y = torch.tensor([row["y"] for row in rows])
        self.names = ["a name"]


class OwnIterator(DataLoader):
    def _get_iterator(self):
        return iter([{"x": torch.ones(8, 16), "y": torch.zeros(8, dtype=torch.long)}] * 80)


def padded(rows):
    """Return rows of a width that changes from batch to batch."""
    padded.calls += 1
    width = 8 + padded.calls % 2 * 8
    return {
        "x": torch.stack([row["x"][:width] for row in rows]),
        "y": torch.tensor([row["y"] for row in rows]),
    }


padded.calls = 0


def loader():
    if KIND in ("endless", "short_stream"):
        return DataLoader(Stream(), batch_size=8)
    if KIND == "own_class":
        return DataLoader(Rows(), batch_size=8, collate_fn=Pair)
    if KIND == "own_iterator":
        return OwnIterator(Rows(), batch_size=8)
    if KIND == "shapes":
        return DataLoader(Rows(), batch_size=8, collate_fn=padded)
    workers = 2 if KIND == "no_worker" else 0
    return DataLoader(
        Rows(), batch_size=8, num_workers=workers, persistent_workers=workers > 0, shuffle=True
    )


def unpack(batch):
    if KIND == "own_class":
        assert batch.names == ["a name"]
        return batch.x, batch.y
    y = batch.pop("y")
    x = batch["x"]
    if KIND == "in_place":
        assert x.max() == 255.0, "the batch was changed before"
        x.div_(255.0)
    if KIND == "input_gradient":
        assert x.grad is None, "gradients pile up"
        x.requires_grad_()
    return x, y


torch.manual_seed(0)
train = loader()
model = (
    nn.LazyLinear(3)
    if KIND != "shapes"
    else nn.Sequential(nn.AdaptiveAvgPool1d(8), nn.Linear(8, 3))
)
with torch.no_grad():
    model(torch.ones(1, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
widths = set()
for epoch in range(100_000):
    steps = 0
    for batch in train:
        x, y = unpack(batch)
        widths.add(x.shape[1])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps += 1
    if KIND in ("dict", "no_worker", "in_place"):
        assert steps == len(train) == 10, "the epoch has another length"
    if KIND == "shapes":
        assert epoch == 0 or len(widths) == 2
