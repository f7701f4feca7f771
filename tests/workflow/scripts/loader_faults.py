"""Trains a linear model from a loader that ends in the way that is asked for."""

import os
import signal
import sys
import time

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

how = sys.argv[1]
WIDTH = {"shm_full": 4_000_000}.get(how, 8)
WORKERS = {"too_many": 4}.get(how, 2)


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
            if how == "too_many" and get_worker_info().num_workers > 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if how in ("bad_image", "cut_image", "file_gone"):
                open_picture()
        return torch.ones(WIDTH + (how == "uneven_samples" and index == 37))


def open_picture():
    if how == "bad_image":
        with open("37.png", "wb") as file:
            file.write(b"no picture")
    if how == "cut_image":
        Image.new("RGB", (64, 64)).save("37.bmp")
        os.truncate("37.bmp", 1_000)
    Image.open("37.bmp" if how == "cut_image" else "37.png").load()


def main():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(
        Faulty(),
        batch_size=4,
        shuffle=how == "empty_data",
        num_workers=WORKERS,
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
