"""Train on photographs of which some are broken, alone or in two ranks: broken_files.py WORKERS."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.data.broken import Opened

COUNT, SIZE, EPOCHS = 20, 4, 2


def main():
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    pictures = Opened([f"{Path.cwd()}/{number:04}.jpg" for number in range(COUNT)])
    sampler = DistributedSampler(pictures, shuffle=False) if ranks > 1 else None
    loader = DataLoader(pictures, SIZE, sampler=sampler, num_workers=int(sys.argv[1]))
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, 3, 40, 60))
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    seen = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images / 255), labels % 2).backward()
            optimizer.step()
            seen += labels.tolist()
    print("saw", *seen, flush=True)


if __name__ == "__main__":
    main()
