"""Draw batches from one loader in this process and print what it took, as JSON.

python -m benchmarks.peers.measure "torch DataLoader" PHOTOGRAPHS FORMATS --seconds 3
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from benchmarks.peers import job
from benchmarks.peers.loaders import CEILINGS, PEERS
from benchmarks.peers.ours import AS_BYTES, OURS

WARM_BATCHES = 3


def cpu_s() -> float:
    """Return the processor time of this process and everything below it, in seconds."""
    own = psutil.Process()
    ended = own.cpu_times()  # some loaders end their workers with each epoch
    total = ended.children_user + ended.children_system
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def memory(folders: Sequence[Path]) -> dict[str, int]:
    """Return the memory of the whole tree, pages that are shared counted once.

    The pages of files below these folders are counted apart: they are the page cache's, which a
    loader that reads instead of mapping them uses just as well.
    """
    own, total, files = psutil.Process(), 0, 0
    roots = tuple(str(folder.resolve()) for folder in folders)
    for process in (own, *own.children(recursive=True)):
        try:
            regions = process.memory_maps(grouped=True)
        except psutil.NoSuchProcess:  # a helper of the loader's that has just ended
            continue
        for region in regions:
            total += region.pss
            files += region.pss if region.path.startswith(roots) else 0
    return {"pss_bytes": total, "mapped_bytes": files}


def main() -> None:
    """Measure one loader."""
    parser = argparse.ArgumentParser()
    loaders = {**PEERS, **OURS, **CEILINGS}
    parser.add_argument("loader", choices=list(loaders))
    parser.add_argument("folder", type=Path)
    parser.add_argument("formats", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    began = time.perf_counter()
    batches = loaders[args.loader](args.folder, args.formats)
    first = next(batches)
    first_s = time.perf_counter() - began
    is_bytes = args.loader in AS_BYTES
    shape = (job.SIDE, job.SIDE, 3) if is_bytes else (3, job.SIDE, job.SIDE)
    assert first.shape == (job.BATCH, *shape), first.shape
    assert first.dtype == (torch.uint8 if is_bytes else torch.float32), first.dtype
    mean, std = float(first.float().mean()), float(first.float().std())
    del first
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
        **memory((args.folder, args.formats)),
        "mean": mean,
        "std": std,
    }
    print(json.dumps(result), flush=True)
    os._exit(0)  # some loaders do not end on their own


if __name__ == "__main__":
    main()
