"""Train on a loader of its own, which makes torch's iterators itself, as fastai's does."""

import torch
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset, default_collate
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter


class HomeMade:
    """What torch's iterators ask of a loader."""

    _dataset_kind, _IterableDataset_len_called, _auto_collation = _DatasetKind.Map, None, True
    num_workers, timeout, prefetch_factor, generator, drop_last = 0, 0, None, None, False
    pin_memory, pin_memory_device, persistent_workers, worker_init_fn = False, "", False, None
    collate_fn = staticmethod(default_collate)

    def __init__(self, dataset, batch_size):
        self.dataset = dataset
        self._index_sampler = BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)

    def __iter__(self):
        return _SingleProcessDataLoaderIter(self)


data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    for x, y in HomeMade(data, 32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
