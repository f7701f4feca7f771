"""Trains a linear model from a loader that ends in the way that is asked for."""

import os
import signal
import sys
import time
from multiprocessing.shared_memory import SharedMemory

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

how = sys.argv[1]
WIDTH = {"shm_full": 100_000}.get(how, 8)
EMPTY = ("no_sample", "empty_stream", "few_samples", "part_of_a_batch")
WORKERS = {"too_many": 4, "tuned_exits": 0, "tuned_hangs": 0}.get(how, 2)


class Faulty(Dataset):
    def __init__(self):
        if how == "not_picklable":
            self.transform = lambda value: value

    def __len__(self):
        return {"empty_data": 0, "no_sample": 0, "few_samples": 3}.get(how, 400)

    def __getitem__(self, index):
        if how in ("tuned_exits", "tuned_hangs"):
            compute(0.005)
            fail_beside_another()
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
                memory = SharedMemory(create=True, size=2**22)
                memory.buf[:] = bytes(2**22)
            if how == "too_many" and get_worker_info().num_workers > 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if how in ("bad_image", "cut_image", "file_gone"):
                open_picture()
        return torch.ones(WIDTH + (how == "uneven_samples" and index == 37))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(8)] * (3 if how == "part_of_a_batch" else 0))


def compute(lasts_s):
    """Keep a core busy: of such samples a tuning proposes as many workers as there are cores."""
    ends_at = time.thread_time() + lasts_s
    while time.thread_time() < ends_at:
        pass


def fail_beside_another():
    """End or hang in the workers that a tuning proposes, if there are two or more."""
    worker = get_worker_info()
    if worker is not None and worker.num_workers > 1:
        time.sleep(600 if how == "tuned_hangs" else 1.0)
        os._exit(3)


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
        Stream() if how in ("empty_stream", "part_of_a_batch") else Faulty(),
        batch_size=4,
        shuffle=how == "empty_data",
        num_workers=WORKERS,
        drop_last=how in ("few_samples", "part_of_a_batch"),
        multiprocessing_context="spawn" if how == "not_picklable" else None,
        timeout=3 if how == "worker_timed_out" else 0,
    )
    for _ in range(3 if how in EMPTY else 1000):
        for batch in loader:
            optimizer.zero_grad()
            model(batch[:, :8]).square().mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
