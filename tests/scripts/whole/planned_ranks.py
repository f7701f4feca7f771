"""A training by torchrun, with lengths of its own a sequence in the loss of every rank."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 1000)

    def forward(self, rows, lengths):
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(found[:, 0])


if __name__ == "__main__":
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    if "sharded" in sys.argv:
        model = fully_shard(Reader().to(local))
    else:
        is_view = "views" in sys.argv
        model = DistributedDataParallel(
            Reader().to(local), device_ids=[local], gradient_as_bucket_view=is_view
        )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    texts = TensorDataset(torch.randn(64, 9, 64), torch.randint(1, 10, (64,)))
    sampler = DistributedSampler(texts)
    for rows, lengths in DataLoader(texts, 4, sampler=sampler):
        loss = model(rows.to(local), lengths).square().mean()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
