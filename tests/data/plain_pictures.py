"""Pictures that a data set scales and nothing else, and a loader that sends them as bytes."""

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from flatout.data.byte_batches.transport import PackingCollate
from tests.data.tails import numpy_arithmetic


class Plain(Dataset):
    """Pictures as they are, scaled."""

    def __init__(self, pictures):
        self.pictures = pictures

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return numpy_arithmetic(self.pictures[index]), index


def plain_loader(*, workers, **options):
    noise = np.random.default_rng(0)
    pictures = [
        Image.fromarray(noise.integers(0, 256, (50, 60, 3), dtype=np.uint8)) for _ in range(24)
    ]
    loader = DataLoader(Plain(pictures), 2, num_workers=workers, **options)
    loader.collate_fn = PackingCollate(loader.collate_fn)
    return loader
