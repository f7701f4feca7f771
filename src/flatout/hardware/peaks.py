"""What the hardware reaches at most, measured: matrix products, memory, copies to the device.

A data sheet's number is reached by no one; a large square product in the same arithmetic is what
this machine really does. `python -m flatout.hardware.peaks DEVICE DTYPE THREADS` measures in a
process of its own and prints JSON; `read_peaks` starts it and keeps what it found. An H200 that
other work shared gave 744 TFLOP/s in bf16, 334 in TF32, 48.5 in fp32, and 4.29 TB/s.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flatout.records.files import module_command, replace_text, with_boot
from flatout.records.input_files import read_json
from flatout.records.json_records import from_plain
from flatout.records.messages import words
from flatout.records.units import GIB, MIB


def ask_module(
    python: str, module: str, arguments: Sequence[str] = (), *, job: Any = None, limit_s: float
) -> Any:
    """Run a module of flatout's by another Python, and return the JSON of its last line.

    The module finds the job as JSON in its standard input.
    """
    try:
        done = subprocess.run(
            module_command(python, module, *arguments),
            env=with_boot(os.environ),
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(words("peak.too_long", seconds=f"{limit_s:.0f}")) from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ValueError(words("peak.failed", error=last[0][:200]))
    return json.loads(done.stdout.splitlines()[-1])


DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64")
"""Arithmetic whose products can be measured."""
BUDGET_S = 0.4
"""Time for one rate: the best of the repeats that fit."""
MIN_REPEATS = 3
SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
"""Rows of the square matrices. The smaller one fits the caches of a CPU and fills a GPU; the better
rate of both counts."""
COPIED_BYTES = {"cpu": 256 * MIB, "cuda": GIB}
"""Beyond every cache that is built today."""
MIN_OWN_SHARE = 0.85
"""A product keeps its threads on their cores all the time, unless others take cores away; then
0.25 to 0.37 was seen on two busy cores, with rates down to half. The limit itself is chosen."""
LIMIT_S = 120.0
"""A product in an arithmetic that a CPU only emulates may take seconds; then it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Rates of one device, the best of several repeats."""

    dtype: str
    gemm_flops_per_s: float
    memory_bytes_per_s: float
    copy_bytes_per_s: float
    threads: int
    own_share: float = 1.0
    """Share of the threads' time that they really had a core; 1 on a device that is no CPU."""
    triad_bytes_per_s: float = 0.0
    """Of `a = b + s * c` within the device's memory: two reads and a write."""
    from_device_bytes_per_s: float = 0.0
    """From the device to pinned host memory; on the CPU, in memory."""
    processors: int = 0
    """Streaming multiprocessors of a GPU; 0 on a CPU."""

    @property
    def is_sound(self) -> bool:
        """Whether no one else used the cores meanwhile."""
        return self.own_share >= MIN_OWN_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class PeaksOf:
    """Which rates are wanted, and everything they depend on."""

    device_kind: str
    """`cpu` or `cuda` (AMD's too), as torch calls it."""
    device_name: str
    dtype: str
    threads: int
    torch_version: str
    driver: str = ""
    """Version of the GPU's driver; empty on a CPU."""

    @property
    def file_name(self) -> str:
        """A name that another machine or torch does not share."""
        words = json.dumps(asdict(self), sort_keys=True)
        return f"peaks-{hashlib.sha256(words.encode()).hexdigest()[:16]}.json"


def read_peaks(wanted: PeaksOf, cache: Path, python: str) -> Peaks:
    """Return the peaks kept in the folder `cache`; measured with `python` where there are none.

    Peaks that were measured alongside other work are returned and not kept.

    Raises:
        ValueError: if this device or arithmetic cannot be measured; says why.
    """
    path = cache / wanted.file_name
    with contextlib.suppress(OSError, ValueError):
        return from_plain(Peaks, read_json(path))
    peaks = measure_in_child(wanted, python)
    if not peaks.is_sound:
        return peaks
    replace_text(path, json.dumps(asdict(peaks)))
    return peaks


def forget_peaks(wanted: PeaksOf, cache: Path) -> None:
    """Remove kept peaks, for instance because a training was seen to be faster than they are."""
    (cache / wanted.file_name).unlink(missing_ok=True)


def measure_in_child(wanted: PeaksOf, python: str) -> Peaks:
    """Measure in a fresh process: torch is not imported here, and no context stays on a device."""
    if wanted.device_kind not in SIZES:
        raise ValueError(words("peak.no_device", kind=wanted.device_kind))
    if wanted.dtype not in DTYPES:
        raise ValueError(words("peak.no_dtype", dtype=wanted.dtype))
    asked = (wanted.device_kind, wanted.dtype, str(wanted.threads))
    try:
        return Peaks(**ask_module(python, __spec__.name, asked, limit_s=LIMIT_S))
    except ValueError as error:
        about = {"dtype": wanted.dtype, "kind": wanted.device_kind}
        raise ValueError(words("peak.unmeasured", **about, why=str(error))) from None


def measure_here(device_kind: str, dtype: str, threads: int) -> Peaks:
    """Measure in this process."""
    import torch

    torch.set_num_threads(threads)
    device = torch.device(device_kind)
    is_cuda = device_kind == "cuda"
    wait = torch.cuda.synchronize if is_cuda else (lambda: None)  # a CPU is done on return
    if dtype == "tf32":
        torch.set_float32_matmul_precision("high")
    kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
    rates = [_gemm_rate(size, device, kind, wait) for size in SIZES[device_kind]]
    return Peaks(
        dtype=dtype,
        gemm_flops_per_s=max(rate for rate, _ in rates),
        own_share=max(share for _, share in rates) / threads if device_kind == "cpu" else 1.0,
        memory_bytes_per_s=_memory_rate(device, wait),
        copy_bytes_per_s=_copy_rate(device, wait),
        threads=threads,
        triad_bytes_per_s=_triad_rate(device, wait),
        from_device_bytes_per_s=_copy_rate(device, wait, back=True),
        processors=torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 0,
    )


def _gemm_rate(size: int, device: Any, dtype: Any, wait: Callable[[], None]) -> tuple[float, float]:
    """Return operations per second, two for each multiplication with addition, and cores used."""
    import torch

    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    began_s, used_s = time.perf_counter(), time.process_time()
    rate = 2.0 * size**3 / best_s(lambda: torch.mm(left, right, out=out), wait)
    cores = (time.process_time() - used_s) / (time.perf_counter() - began_s)
    return rate, cores


def _memory_rate(device: Any, wait: Callable[[], None]) -> float:
    """Return bytes read plus written per second, of a copy within the device's memory."""
    import torch

    count = COPIED_BYTES[device.type]
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * count / best_s(lambda: target.copy_(source), wait)


def _triad_rate(device: Any, wait: Callable[[], None]) -> float:
    """Return bytes read plus written per second, as the STREAM benchmark counts its triad."""
    import torch

    count = COPIED_BYTES[device.type] // 4
    left, right = (torch.ones(count, dtype=torch.float32, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 12.0 * count / best_s(lambda: torch.add(left, right, alpha=3.0, out=out), wait)


def _copy_rate(device: Any, wait: Callable[[], None], *, back: bool = False) -> float:
    """Return bytes per second between pinned host memory and the device; on the CPU, in memory."""
    import torch

    count = COPIED_BYTES["cpu"]
    is_cuda = device.type == "cuda"
    host = torch.ones(count, dtype=torch.uint8, pin_memory=is_cuda)
    there = torch.empty(count, dtype=torch.uint8, device=device)
    source, target = (there, host) if back else (host, there)
    return count / best_s(lambda: target.copy_(source, non_blocking=is_cuda), wait)


def best_s(
    call: Callable[[], object], wait: Callable[[], None], budget_s: float = BUDGET_S
) -> float:
    """Return the shortest of the calls that fit into the budget; the first is not counted.

    >>> best_s(lambda: time.sleep(0.002), lambda: None, budget_s=0.01) >= 0.002
    True
    """
    call()
    wait()
    times_s: list[float] = []
    began = time.perf_counter()
    while len(times_s) < MIN_REPEATS or time.perf_counter() - began < budget_s:
        start = time.perf_counter()
        call()
        wait()
        times_s.append(time.perf_counter() - start)
    return min(times_s)


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps(asdict(measure_here(sys.argv[1], sys.argv[2], int(sys.argv[3])))) + "\n"
    )
