"""Two ranks train on random parts of the same pictures, and tell each other what keeps these."""

import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FOLDER = Path("pictures")
COUNT, SIDE, PART = 32, 96, 64
STEPS_SEEN = 6


def make_pictures():
    FOLDER.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(FOLDER / f"{number:02}.jpg", quality=90)


class Parts(Dataset):
    def __init__(self):
        self.files = sorted(FOLDER.glob("*.jpg"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index]).convert("RGB")
        left, top = (random.randint(0, SIDE - PART) for _ in range(2))
        pixels = np.asarray(image.crop((left, top, left + PART, top + PART)), np.float32) / 255
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), index % 3


def stores():
    """Return the numbers of the memory that stores of pictures lie in, in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in lines if "flatout-store" in line})


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make_pictures()
    dist.barrier()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(3 * PART * PART, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    dataset = Parts()
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
    step = 0
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            if step == STEPS_SEEN:
                told = [None, None]
                dist.all_gather_object(told, stores())
                assert told[0] == told[1] != [], f"the ranks keep their pictures in {told}"


if __name__ == "__main__":
    main()
