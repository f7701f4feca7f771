"""Time matrix products alone, in a process of its own.

`python -m flatout.workflow.products_alone` reads a job as JSON and prints times as JSON. Operands
are normal random numbers: a GPU that multiplies zeros is faster than one that has work to do. Each
call takes the next of several sets of operands, so that they do not come from the caches. On an
H200 the products of a GPT in fp32 came to 70 to 97 % of what the device reaches.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flatout.analysis.products import GROUPED

BUDGET_S = 0.3
"""Time for one product; a slow one is called `MIN_BLOCKS` times whatever that takes."""
MIN_BLOCKS = 3
MAX_BLOCKS = 50
BLOCK_S = 0.002
"""A block of calls lasts at least so long: a clock that ticks in microseconds is then exact to a
thousandth, and the launches of a GPU run ahead."""
FLUSHED_BYTES = {"cpu": 128 * 1024**2, "cuda": 256 * 1024**2}
"""All sets of operands together: beyond the last cache of a CPU, as far as usual, and of a GPU."""
MAX_SETS = 64
GROUP_OF = 16
"""Rows that groups are made of where they are made up: 16 bytes of any number."""
DTYPE = "torch."
"""What the name of a number's kind begins with, where one is an argument."""


def run_job(job: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Time every group within the limit."""
    torch.set_num_threads(job["threads"])
    deadline = time.perf_counter() + job["limit_s"]
    found = []
    with torch.no_grad():
        for group in job["groups"]:
            if time.perf_counter() > deadline:
                found.append([{"why": "no time was left to time it alone"} for _ in group])
                continue
            found.append(time_group(group, job["device"]))
    return found


def time_group(group: Sequence[Mapping[str, Any]], device: str) -> list[dict[str, Any]]:
    """Time the calls of one group in turn."""
    try:
        runs = [_Run(call, device) for call in group]
        times = _in_turn(runs)
    except (RuntimeError, NotImplementedError, TypeError, MemoryError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return [{"why": why} for _ in group]
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
    # The best block, as the ceilings are the best of their repeats: what others take is left out.
    return [{"ms": 1e3 * min(found), "n": len(found)} for found in times]


class _Run:
    """One call with several sets of operands, and how to time a block of it."""

    def __init__(self, call: Mapping[str, Any], device: str) -> None:
        name = call["operator"].removeprefix("aten::")
        self.operator: Callable[..., Any] = getattr(torch.ops.aten, name)
        self.device = torch.device(device)
        self.is_tf32 = bool(call["tf32"])
        first = [_made(argument, self.device) for argument in call["arguments"]]
        if name == GROUPED and len(first) > 2 and first[2] is not None:
            first[2] = even_ends(*first[:3])
        size = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
        sets = min(MAX_SETS, 1 + FLUSHED_BYTES[device] // max(size, 1))
        self.sets = [first, *([_copied(item) for item in first] for _ in range(sets - 1))]
        self.at = 0
        self.calls = 1
        self.block_s()  # the first call chooses algorithms and asks for memory
        self.calls = max(1, round(BLOCK_S / max(self.block_s(), 1e-7)))

    def block_s(self) -> float:
        """Return the seconds of one call, over a block of calls."""
        torch.set_float32_matmul_precision("high" if self.is_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.is_tf32
        if self.device.type == "cuda":
            return self._block_by_events()
        began = time.perf_counter()
        self._call()
        return (time.perf_counter() - began) / self.calls

    def _call(self) -> None:
        for _ in range(self.calls):
            self.at = (self.at + 1) % len(self.sets)
            self.operator(*self.sets[self.at])

    def _block_by_events(self) -> float:
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        self._call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / self.calls


def _in_turn(runs: Sequence[_Run]) -> list[list[float]]:
    """Return the times of blocks, one of each run after the other."""
    times: list[list[float]] = [[] for _ in runs]
    began = time.perf_counter()
    while len(times[0]) < MIN_BLOCKS or (
        len(times[0]) < MAX_BLOCKS and time.perf_counter() - began < BUDGET_S * len(runs)
    ):
        for run, found in zip(runs, times, strict=True):
            found.append(run.block_s())
    return times


def even_ends(left: Any, right: Any, ends: Any) -> Any:
    """Return where groups end that are all as large: random numbers would be no places.

    Kernels want groups along a sum to begin at whole lines of their numbers.
    """
    along = {(2, 3): left.shape[0], (2, 2): left.shape[1]}
    total = along.get((left.dim(), right.dim()), right.shape[-1])
    step = total // len(ends) // GROUP_OF * GROUP_OF
    found = step * torch.arange(1, len(ends) + 1, dtype=ends.dtype, device=ends.device)
    found[-1] = total
    return found


def _made(value: Any, device: Any) -> Any:
    """Return an argument like the one that was described."""
    if isinstance(value, list):
        return [_made(item, device) for item in value]
    if isinstance(value, str) and value.startswith(DTYPE):
        return getattr(torch, value.removeprefix(DTYPE))
    if not isinstance(value, dict):
        return value
    dtype = getattr(torch, value["dtype"])
    sizes = zip(value["shape"], value["stride"], strict=True)
    extent = 1 + sum((size - 1) * step for size, step in sizes)
    flat = torch.randn(extent, device=device).to(dtype)
    return flat.as_strided(value["shape"], value["stride"])


def _copied(value: Any) -> Any:
    """Return a tensor with the same numbers elsewhere, lying the same way."""
    if not isinstance(value, torch.Tensor):
        return value
    extent = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    flat = value.as_strided((extent,), (1,)).clone()
    return flat.as_strided(value.shape, value.stride())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_job(json.load(sys.stdin))) + "\n")
