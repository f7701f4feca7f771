"""Put a load on the device whose counters are known beforehand, and say when it begins.

    python known_load.py idle|small|product SECONDS

`idle` holds a context and runs nothing, `small` adds one number at a time, `product` multiplies
large matrices in bf16. On the CPU the same, smaller.
"""

import sys
import time

import torch

ROWS, SMALL_ROWS = 8192, 256
AHEAD = 64
"""Calls between two waits: the queue is never empty, and ends with the load."""


def main():
    """Run the load."""
    kind, seconds = sys.argv[1], float(sys.argv[2])
    has_device = torch.cuda.is_available()
    device = "cuda" if has_device else "cpu"
    rows = ROWS if has_device else SMALL_ROWS
    one = torch.zeros(1, device=device)
    a = torch.randn(rows, rows, device=device).bfloat16() if kind == "product" else one
    wait = torch.cuda.synchronize if has_device else lambda: None
    for _ in range(3):
        a @ a if kind == "product" else one.add_(1)
    wait()
    print(f"began {time.perf_counter()}", flush=True)
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        if kind == "idle":
            time.sleep(0.05)
            continue
        for _ in range(AHEAD if kind == "small" else 4):
            a @ a if kind == "product" else one.add_(1)
        wait()
    print(f"ended {time.perf_counter()}", flush=True)


if __name__ == "__main__":
    main()
