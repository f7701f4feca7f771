"""Trains a linear model from a loader that ends in the way that is asked for."""

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

how = sys.argv[1]
WIDTH = {"shm_full": 4_000_000}.get(how, 8)


class Faulty(Dataset):
    def __init__(self):
        if how == "not_picklable":
            self.transform = lambda value: value

    def __len__(self):
        return 0 if how == "empty_data" else 400

    def __getitem__(self, index):
        if index == 37:
            time.sleep(1.0)  # what was made before is received: torch then tells how a worker ended
            if how == "worker_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "worker_crashed":
                os.kill(os.getpid(), signal.SIGSEGV)
            if how == "worker_exited":
                os._exit(3)
            if how == "worker_hung":
                time.sleep(600)
            if how == "bus_error":
                os.kill(os.getpid(), signal.SIGBUS)
        return torch.ones(WIDTH)


def main():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(
        Faulty(),
        batch_size=4,
        shuffle=how == "empty_data",
        num_workers=2,
        multiprocessing_context="spawn" if how == "not_picklable" else None,
        timeout=3 if how == "worker_timed_out" else 0,
    )
    for _ in range(1000):
        for batch in loader:
            optimizer.zero_grad()
            model(batch[:, :8]).square().mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
