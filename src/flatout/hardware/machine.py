"""Read the machine: one record of everything that techniques, plans and `doctor` ask about."""

import os
import platform
from pathlib import Path
from typing import Any

from flatout.hardware.accelerator import (
    TorchBuild,
    devices_by_torch,
    devices_of,
    find_tcmalloc,
    torch_build,
    trouble_with_cuda,
)
from flatout.hardware.gpus import Driver, pci_gpus, read_driver
from flatout.hardware.limits import (
    ROOT,
    affinity,
    host_memory_bytes,
    memory_limit_bytes,
    quota_cores,
    read_text,
    shm_bytes,
    swap_bytes,
    usable_cores,
)
from flatout.hardware.system import find_compiler, huge_pages, open_files_limit
from flatout.records.json_records import to_plain
from flatout.records.machine import Device, Machine

FEATURES = frozenset(
    {
        *("avx2", "avx512f", "amx_int8", "sve"),
        *("avx512_bf16", "amx_bf16", "bf16"),
        *("avx512_fp16", "amx_fp16", "asimdhp"),
    }
)
"""The instruction sets that change what is worth trying; `sve`, `bf16` and `asimdhp` (half
precision) are Arm's names."""


def cpu_name(root: Path = ROOT) -> str:
    """Return the processor's name; empty where the kernel does not tell it."""
    for field in ("model name", "Processor", "Hardware", "cpu model"):
        if name := _field(field, root):
            return " ".join(name.split())
    return ""


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Return those of `FEATURES` that the processor has."""
    flags = _field("flags", root) or _field("Features", root)
    return FEATURES & frozenset(flags.lower().split())


def physical_cores(cpus: frozenset[int] | None = None, root: Path = ROOT) -> int:
    """Return the number of physical cores behind the given logical ones (default: usable ones)."""
    topology = root / "sys/devices/system/cpu"
    groups = set()
    for number in affinity() if cpus is None else cpus:
        folder = topology / f"cpu{number}/topology"
        siblings = read_text(folder / "core_cpus_list") or read_text(
            folder / "thread_siblings_list"
        )
        groups.add(siblings or str(number))
    return len(groups)


def _field(name: str, root: Path) -> str:
    """Return the first value of a field in /proc/cpuinfo."""
    for line in read_text(root / "proc/cpuinfo").splitlines():
        key, _colon, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


WATCHED_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "LD_PRELOAD", "MKL_NUM_THREADS", "OMP_NUM_THREADS"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_COMPILE_DISABLE"),
)
"""Environment variables that change what training costs; recorded where they are set."""


def read_machine(*, torch: bool = True) -> Machine:
    """Return what this process may use.

    Args:
        torch: Ask torch which accelerators it finds. Without, build and driver are read instead,
            which takes milliseconds instead of seconds and is right unless they do not fit. A torch
            built for AMD is asked in any case: no driver of theirs is read here.
    """
    build = torch_build()
    driver = read_driver()
    asks_torch = bool(build.version) and (torch or build.hip is not None)
    devices = devices_by_torch(driver) if asks_torch else devices_of(driver, build)
    memory_limit = memory_limit_bytes()
    memory = memory_limit or host_memory_bytes()
    name = cpu_name() or platform.processor() or platform.machine()
    usable = usable_cores()
    facts = _system_facts() | _torch_facts(build, driver)
    if asks_torch and not devices and not build.is_cpu_only:
        facts["torch_trouble"] = trouble_with_cuda()
    return Machine(
        device=devices[0] if devices else Device(kind="cpu", name=name, memory_bytes=memory),
        devices=devices,
        cpu_name=name,
        logical_cores=os.cpu_count() or 1,
        usable_cores=usable,
        physical_cores=max(1, min(usable, physical_cores())),
        memory_bytes=memory,
        shm_free_bytes=shm_bytes()[1],
        cpu_features=cpu_features(),
        tcmalloc_path=find_tcmalloc(),
        torch_version=build.version,
        facts=facts,
    )


def _system_facts() -> dict[str, Any]:
    swap_size, swap_used = swap_bytes()
    soft, hard = open_files_limit()
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "affinity_cores": len(affinity()),
        "quota_cores": quota_cores(),
        "memory_limit_bytes": memory_limit_bytes(),
        "shm_bytes": shm_bytes()[0],
        "swap_bytes": swap_size,
        "swap_used_bytes": swap_used,
        "huge_pages": huge_pages(),
        "compiler": find_compiler(),
        "open_files_soft": soft,
        "open_files_hard": hard,
        "variables": {k: os.environ[k] for k in WATCHED_VARIABLES if k in os.environ},
    }


def _torch_facts(build: TorchBuild, driver: Driver) -> dict[str, Any]:
    return {
        "torch_cuda": build.cuda,
        "torch_hip": build.hip,
        "torch_trouble": "",
        "driver": driver.version,
        "driver_cuda": driver.cuda,
        "driver_trouble": driver.trouble,
        "gpus": [to_plain(gpu) for gpu in driver.gpus],
        "pci_gpus": pci_gpus(),
    }
