"""Let worker processes make the batches. They are the same batches, in the same order.

Workers that stay between epochs (persistent_workers) draw no new seed at an epoch's start, so that
from the second epoch on the order differs. "Four a GPU" and "two to four a core" are
guesses: what is best depends on the samples.

    python examples/articles/loader_workers.py
    flatout tune --only loader_workers,persistent_workers examples/articles/loader_workers.py
"""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    """Samples that take a while to make, as photographs do."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 32, 32, generator=generator)
        for _ in range(3):
            image = (image - image.mean()) / image.std()
        return image, index % 10


def batches(workers, stay=False):
    more = (
        {"persistent_workers": stay, "prefetch_factor": 4} if workers else {}
    )  # errors without workers
    order = torch.Generator().manual_seed(0)
    return DataLoader(
        Slow(), batch_size=32, shuffle=True, generator=order, num_workers=workers, **more
    )


def train(loader, epochs=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


if (
    __name__ == "__main__"
):  # workers that are spawned import this file: without the line each would train
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(cores, 2)  # a start: flatout measures how many are best
    alone, several, staying = (
        train(batches(0)),
        train(batches(workers)),
        train(batches(workers, stay=True)),
    )
    print(
        f"result: the same losses with workers: {alone == several}; "
        f"with persistent workers: {alone == staying}"
    )
