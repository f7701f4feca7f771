"""Readings of the GPUs from NVIDIA's driver, through NVML. No torch, no context.

A process that asks torch about a GPU may create a context there, which costs hundreds of MiB of
the memory that a trial is about to need. The driver's own library costs nothing.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.hardware.limits import ROOT, read_text
from flatout.records.machine import GPU_VARIABLES
from flatout.records.messages import words

PCI_VENDORS = frozenset({"0x10de", "0x1002"})
"""NVIDIA and AMD."""

PCI_COMPUTE_CLASSES = ("0x0302", "0x1200")
"""3D controller and processing accelerator. Plain display cards are left out: many machines have
one that no one means to train on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver sees it now."""

    index: int
    """The driver's number, in the order of the PCI bus."""
    kind: str
    """`cuda`."""
    name: str
    uuid: str = ""
    memory_bytes: int = 0
    used_bytes: int = 0
    busy_share: float | None = None
    """Share of the last second in which a kernel ran."""
    pids: tuple[int, ...] = ()
    """Processes that compute on it."""
    compute_capability: tuple[int, int] | None = None
    instances: tuple["Gpu", ...] = ()
    """The parts it is split into (MIG), as far as the driver tells; empty for a whole one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The GPU driver and its GPUs; both empty on a machine without one."""

    version: str = ""
    cuda: str = ""
    """Newest CUDA version the driver can run, as `12.8`."""
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""
    """Why nothing could be read, in the library's own words."""


def visible(gpus: Sequence[Gpu], variables: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs that a process sees, given its environment, in its order.

    As CUDA reads it: numbers or the beginning of a UUID, up to the first entry that names nothing;
    an empty list hides every GPU. Of GPUs that are split into instances (MIG) a process sees one
    instance, the one that is named or the first, and nothing else.

    >>> two = [Gpu(index=i, kind="cuda", name="A", uuid=f"GPU-{i}f") for i in range(2)]
    >>> [gpu.index for gpu in visible(two, {"CUDA_VISIBLE_DEVICES": "1,0"})]
    [1, 0]
    >>> visible(two, {"CUDA_VISIBLE_DEVICES": ""})
    ()
    """
    environment = os.environ if variables is None else variables
    for name in GPU_VARIABLES:
        if name in environment:
            return _as_instances(_chosen(gpus, environment[name]))
    return _as_instances(gpus)


def pci_gpus(root: Path = ROOT) -> int:
    """Return how many compute GPUs sit in the machine's slots, driver or not."""
    folders = (root / "sys/bus/pci/devices").glob("*")
    return sum(
        read_text(folder / "vendor") in PCI_VENDORS
        and read_text(folder / "class").startswith(PCI_COMPUTE_CLASSES)
        for folder in folders
    )


def _chosen(gpus: Sequence[Gpu], text: str) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    known = [each for gpu in gpus for each in (gpu, *gpu.instances)]
    for entry in (part.strip() for part in text.split(",")):
        if entry.isdigit():
            matches = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            matches = [gpu for gpu in known if entry and gpu.uuid.startswith(entry)]
        if len(matches) != 1:
            break
        found.extend(matches)
    return tuple(found)


def _as_instances(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    for gpu in gpus:
        if gpu.instances or gpu.uuid.startswith("MIG-"):
            return gpu.instances[:1] or (gpu,)
    return tuple(gpus)


def read_driver() -> Driver:
    """Return what NVIDIA's driver tells, or why it tells nothing."""
    try:
        import pynvml
    except ImportError:
        return Driver(trouble=words("counter.no_bindings"))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Driver(trouble=str(error))
    try:
        version = _text(pynvml.nvmlSystemGetDriverVersion())
        code = pynvml.nvmlSystemGetCudaDriverVersion()
        count = pynvml.nvmlDeviceGetCount()
        return Driver(
            version=version,
            cuda=f"{code // 1000}.{code % 1000 // 10}",
            gpus=tuple(_whole_gpu(pynvml, index) for index in range(count)),
        )
    except pynvml.NVMLError as error:
        return Driver(trouble=str(error))
    finally:
        answer(pynvml, "nvmlShutdown")


def answer(nvml: Any, question: str, *arguments: Any) -> Any:
    """Return what the driver tells; None where a model, a container or a version does not."""
    try:
        return getattr(nvml, question)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _whole_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    rates = answer(nvml, "nvmlDeviceGetUtilizationRates", handle)
    processes = answer(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    capability = answer(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    one = {"index": index, "compute_capability": tuple(capability) if capability else None}
    is_split, _pending = answer(nvml, "nvmlDeviceGetMigMode", handle) or (False, False)
    most_parts = answer(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) if is_split else 0
    instances = []
    for number in range(most_parts or 0):
        with contextlib.suppress(nvml.NVMLError):  # a place that holds no instance
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            instances.append(_gpu(nvml, part, memory_of(nvml, part), **one))
    memory = 0, 0
    # A container with a part of a GPU may not ask for the whole; some share the host's memory.
    with contextlib.suppress(nvml.NVMLError):
        memory = memory_of(nvml, handle)
    return _gpu(
        nvml,
        handle,
        memory,
        **one,
        busy_share=rates.gpu / 100 if rates else None,
        pids=tuple(process.pid for process in processes or ()),
        instances=tuple(instances),
    )


def _gpu(nvml: Any, handle: Any, memory: tuple[int, int], **facts: Any) -> Gpu:
    return Gpu(
        kind="cuda",
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=memory[0],
        used_bytes=memory[1],
        **facts,
    )


def memory_of(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return the bytes that processes may use of a GPU, and how many they do use.

    The first version of NVML's answer counts what driver and firmware reserve (some 600 MiB of an
    H100) among the total and among the used; only the second one tells it apart.

    Raises:
        NVMLError: if the driver tells neither.
    """
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        return int(memory.total) - int(memory.reserved), int(memory.used)
    except (nvml.NVMLError, AttributeError):  # a driver before 510, or a part that tells less
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)


def _text(value: str | bytes) -> str:
    """Return text; older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value
