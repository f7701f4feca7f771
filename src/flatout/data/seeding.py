"""Augmentation as a function of seed, epoch and sample, for any data set."""

from typing import Any

from torch.utils.data import Dataset

from flatout.data.sampler import sample_seed, seeded


class Seeded(Dataset[Any]):
    """A data set whose samples draw from streams of their own, whatever process makes them.

    What `dataset[index]` draws from `random`, NumPy and torch is a function of the seed, the epoch
    and the index. The epoch comes with the index from a `GlobalOrder`; for other samplers it is
    what `set_epoch` said before the loader's workers started.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        epoch = getattr(index, "epoch", self.epoch)
        with seeded(sample_seed(self.seed, epoch, int(index) % len(self.dataset))):
            return self.dataset[int(index)]

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, where the sampler does not."""
        self.epoch = epoch
