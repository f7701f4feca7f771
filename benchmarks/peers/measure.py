"""Draw batches from one loader in this process and print what it took, as JSON.

python -m benchmarks.peers.measure "torch DataLoader" PHOTOGRAPHS FORMATS --seconds 3
"""

import argparse
import json
import os
import time
from pathlib import Path

import psutil
import torch

from benchmarks.peers import job
from benchmarks.peers.loaders import PEERS
from benchmarks.peers.ours import OURS

WARM_BATCHES = 3


def cpu_s() -> float:
    """Return the processor time of this process and everything below it, in seconds."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def pss_bytes() -> int:
    """Return the memory of the whole tree, pages that are shared counted once."""
    own = psutil.Process()
    return sum(p.memory_full_info().pss for p in (own, *own.children(recursive=True)))


def main() -> None:
    """Measure one loader."""
    parser = argparse.ArgumentParser()
    parser.add_argument("loader", choices=[*PEERS, *OURS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("formats", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    began = time.perf_counter()
    batches = ({**PEERS, **OURS})[args.loader](args.folder, args.formats)
    first = next(batches)
    first_s = time.perf_counter() - began
    assert first.shape == (job.BATCH, 3, job.SIDE, job.SIDE), first.shape
    assert first.dtype == torch.float32, first.dtype
    for _ in range(WARM_BATCHES):
        next(batches)
    cpu_before, before, count = cpu_s(), time.perf_counter(), 0
    while time.perf_counter() - before < args.seconds:
        count += len(next(batches))
    wall_s, spent_s = time.perf_counter() - before, cpu_s() - cpu_before
    result = {
        "images": count,
        "wall_s": wall_s,
        "cpu_s": spent_s,
        "first_s": first_s,
        "pss_bytes": pss_bytes(),
        "mean": float(first.mean()),
        "std": float(first.std()),
    }
    print(json.dumps(result), flush=True)
    os._exit(0)  # some loaders do not end by themselves


if __name__ == "__main__":
    main()
