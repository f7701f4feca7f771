"""What ranks of this machine exchange in a second: a probe of 10 to 20 s, and its file.

`measure_links` starts it by torchrun; on several hosts torchrun starts `python -m
flatout.parallel.links FILE` on each, and rank 0 writes the file.
"""

import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatout.parallel.cost import Link
from flatout.records.errors import UserError
from flatout.records.plan import NumberSource

SCHEMA = "flatout.links/1"
PROBE_S = 20.0
"""About how long it takes, the start of the processes left out."""
LIMIT_S = 180.0
SIZES = tuple(4**exponent for exponent in range(5, 13))
"""Numbers in fp32: 4 KiB to 64 MiB."""
EACH_S = PROBE_S / 4 / len(SIZES)
LEAST_REPEATS = 3


def measure_links(path: Path, ranks: int) -> None:
    """Measure between so many processes of this machine and write the file.

    Raises:
        UserError: if they could not be started, or found no way to each other.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "-m", "flatout.parallel.links", str(path)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"the links were not measured within {LIMIT_S:.0f} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "Error" in line]
        raise UserError(f"the links could not be measured: {(said or ['it failed'])[-1]}")


def link_from(plain: Mapping[str, Any]) -> Link:
    """Return the link that a probe wrote.

    Raises:
        ValueError: where it is none.
    """
    if plain.get("schema") != SCHEMA:
        raise ValueError(f"not a {SCHEMA} file; remove it to measure again")
    measured = tuple((float(size), float(seconds)) for size, seconds in plain["all_reduce"])
    return Link(
        latency_s=float(plain["latency_s"]),
        bytes_per_s=float(plain["bytes_per_s"]),
        overlap=float(plain["overlap"]),
        source=NumberSource.CALIBRATED,
        measured={int(plain["ranks"]): measured},
    )


def line_of(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return latency and bytes a second of exchanges: the line with least relative errors.

    >>> latency, rate = line_of([0, 1000, 2000], [1.0, 2.0, 3.0])
    >>> round(latency, 6), round(rate, 3)
    (1.0, 1000.0)
    """
    spent = np.array(seconds)
    rows = np.stack([np.ones(len(sizes)), np.array(sizes)], axis=1) / spent[:, None]
    latency, inverse = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]
    return max(0.0, float(latency)), 1 / max(float(inverse), 1e-15)


def main(path: str) -> int:
    """Measure as one of the ranks that torchrun started."""
    import torch
    import torch.distributed as dist

    from flatout.parallel import group

    is_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("nccl" if is_gpu else "gloo")
    if is_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device, ranks = group.device_of_group(), dist.get_world_size()
    curve = []
    for size in SIZES:
        numbers = torch.zeros(size, device=device)
        curve.append((4 * size, _seconds(functools.partial(dist.all_reduce, numbers))))
    # An all-reduce of a ring is 2 (n-1) hops, and sends 2 (n-1)/n of its bytes.
    latency_s, rate = line_of(*zip(*curve, strict=True))
    hops = 2 * (ranks - 1)
    found = {
        "schema": SCHEMA,
        "backend": dist.get_backend(),
        "ranks": ranks,
        "latency_s": latency_s / hops,
        "bytes_per_s": rate * hops / ranks,
        "overlap": _overlap(device),
        "all_reduce": curve,
    }
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found, indent=1), encoding="utf-8")
    dist.destroy_process_group()
    return 0


def _seconds(act: Callable[[], Any]) -> float:
    """Return the median time of an exchange; all ranks repeat it equally often."""
    import torch
    import torch.distributed as dist

    from flatout.parallel import group

    device = group.device_of_group()
    act()
    spent: list[float] = []
    ends_at = time.monotonic() + EACH_S
    goes_on = torch.ones(1, device=device)
    while len(spent) < LEAST_REPEATS or goes_on.item():
        dist.barrier()
        started = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - started)
        goes_on.fill_(time.monotonic() < ends_at)
        dist.broadcast(goes_on, 0)
    return statistics.median(spent)


def _overlap(device: Any) -> float:
    """Return the share of an exchange that goes on while the rank computes."""
    import torch
    import torch.distributed as dist

    numbers = torch.zeros(SIZES[-2], device=device)
    matrix = torch.ones(512, 512, device=device)
    exchange_s = _seconds(lambda: dist.all_reduce(numbers))
    product_s = _seconds(lambda: matrix @ matrix)
    times = max(1, round(exchange_s / product_s))

    def compute() -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    def both() -> None:
        work = dist.all_reduce(numbers, async_op=True)
        compute()
        work.wait()

    apart_s, together_s = _seconds(compute) + exchange_s, _seconds(both)
    return float(min(1.0, max(0.0, (apart_s - together_s) / exchange_s)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
