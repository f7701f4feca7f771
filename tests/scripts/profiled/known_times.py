"""Spends a known time in the legs it is told to, and writes how long it really was.

Each leg's seconds are measured here, by this script's own stopwatch, and written as they are when
an optimizer step ends; flatout has to find the same shares without being told.
"""

import argparse
import contextlib
import json
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

LEGS = ("read", "decode", "collate", "h2d", "forward", "loss", "optimizer", "other")
SPENT = dict.fromkeys(("wait", "backward", *LEGS), 0.0)


OPEN = {}


@contextlib.contextmanager
def stopwatch(leg):
    began = time.perf_counter()
    try:
        yield
    finally:
        SPENT[leg] += time.perf_counter() - began


def busy(ms):
    """Keep a core at work for so long."""
    ends = time.perf_counter() + ms / 1e3
    while time.perf_counter() < ends:
        pass


def core_delay_s():
    """Return how long this thread was ready and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def idle(ms):
    """Wait for so long, as for a disk; what waking up late adds is no reading."""
    late_s = core_delay_s()
    with stopwatch("read"):
        time.sleep(ms / 1e3)
    SPENT["read"] -= core_delay_s() - late_s


def write(path, leg, **more):
    """Append a row; the file stays open, so that writing hardly takes time of its own."""
    with stopwatch(leg):
        if path not in OPEN:
            OPEN[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        row = json.dumps({"at": time.perf_counter()} | SPENT | more)
        os.write(OPEN[path], (row + "\n").encode())


class Samples(Dataset):
    def __init__(self, ms):
        self.ms = ms

    def __len__(self):
        return 4 * 4000

    def __getitem__(self, index):
        before, began = SPENT["read"], time.perf_counter()
        if self.ms["read"]:
            idle(self.ms["read"] / 4)
        busy(self.ms["decode"] / 4)
        sample = torch.ones(8)
        SPENT["decode"] += time.perf_counter() - began - (SPENT["read"] - before)
        return sample


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        for index in range(len(self.samples)):
            yield self.samples[index]


class Collate:
    """Puts the samples together, and writes what this worker has spent so far."""

    def __init__(self, ms, folder):
        self.ms, self.folder = ms, folder
        self.batches = 0

    def __call__(self, samples):
        with stopwatch("collate"):
            batch = torch.stack(samples)
            busy(self.ms["collate"])
        self.batches += 1
        if torch.utils.data.get_worker_info() is not None:
            write(self.folder / f"worker-{os.getpid()}.jsonl", "collate", batches=self.batches)
        return batch


class OnHost(torch.Tensor):
    """A stand-in for a batch whose copy to the device takes a while."""

    ms = 0.0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == "to":
                busy(cls.ms)
            return func(*args, **kwargs or {})


class Net(torch.nn.Module):
    def __init__(self, ms):
        super().__init__()
        self.ms = ms
        self.line = torch.nn.Linear(8, 8)

    def forward(self, x):
        busy(self.ms["forward"])
        return self.line(x)


class Descent(torch.optim.SGD):
    ms, out = 0.0, None

    def step(self, closure=None):
        with stopwatch("optimizer"):
            busy(self.ms)
            super().step(closure)
        write(self.out / "steps.jsonl", "optimizer")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--start")
    parser.add_argument("--stream", action="store_true")
    for leg in LEGS:
        parser.add_argument(f"--{leg}", type=float, default=0.0)
    told = parser.parse_args()
    ms = {leg: getattr(told, leg) for leg in LEGS}
    torch.set_num_threads(1)
    samples = Samples(ms)
    loader = DataLoader(
        Stream(samples) if told.stream else samples,
        batch_size=4,
        num_workers=told.workers,
        collate_fn=Collate(ms, told.out),
        multiprocessing_context=told.start,
    )
    net = Net(ms)
    OnHost.ms, Descent.ms, Descent.out = ms["h2d"], ms["optimizer"], told.out
    optimizer = Descent(net.parameters(), lr=1e-3)
    batches = iter(loader)
    while True:
        with stopwatch("wait"):
            batch = next(batches)
        with stopwatch("h2d"):
            batch.as_subclass(OnHost).to("meta")
        with stopwatch("forward"):
            output = net(batch)
        with stopwatch("loss"):
            busy(ms["loss"])
            loss = output.square().mean()
        with stopwatch("backward"):
            loss.backward()
        optimizer.step()
        with stopwatch("other"):
            optimizer.zero_grad()
            busy(ms["other"])


if __name__ == "__main__":
    main()
