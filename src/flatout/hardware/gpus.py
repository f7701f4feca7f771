"""Readings of the GPUs from the driver: NVML for NVIDIA, AMD SMI for AMD. No torch, no context.

A process that asks torch about a GPU may create a context there, which costs hundreds of MiB of
the memory that a trial is about to need. The driver's own libraries cost nothing.
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
    """`cuda` or `rocm`."""
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


def read_driver() -> Driver:
    """Return what the driver of this machine tells: NVIDIA's, else AMD's, else nothing."""
    nvidia = _read_nvml()
    if nvidia.gpus or nvidia.version:
        return nvidia
    amd = _read_amdsmi()
    return amd if amd.gpus else nvidia


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


def _read_nvml() -> Driver:
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
            gpus=tuple(_nvidia_gpu(pynvml, index) for index in range(count)),
        )
    except pynvml.NVMLError as error:
        return Driver(trouble=str(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nvidia_gpu(nvml: Any, index: int) -> Gpu:
    """Read one GPU. What a model or a container does not offer is left out, not guessed."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    busy = pids = capability = memory = None
    with contextlib.suppress(nvml.NVMLError):
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(nvml.NVMLError):
        pids = tuple(p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    with contextlib.suppress(nvml.NVMLError):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = (int(major), int(minor))
    # A container with a part of a GPU may not ask for the whole; some share the host's memory.
    with contextlib.suppress(nvml.NVMLError):
        memory = memory_of(nvml, handle)
    return Gpu(
        index=index,
        kind="cuda",
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=memory[0] if memory else 0,
        used_bytes=memory[1] if memory else 0,
        busy_share=busy,
        pids=pids or (),
        compute_capability=capability,
        instances=_instances(nvml, handle, index, capability),
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


def _instances(
    nvml: Any, handle: Any, index: int, capability: tuple[int, int] | None
) -> tuple[Gpu, ...]:
    """Return the parts that a GPU is split into; none where it is not, or no one tells."""
    found: list[Gpu] = []
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return ()
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):  # a place that holds no instance
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                memory = memory_of(nvml, part)
                found.append(
                    Gpu(
                        index=index,
                        kind="cuda",
                        name=_text(nvml.nvmlDeviceGetName(part)),
                        uuid=_text(nvml.nvmlDeviceGetUUID(part)),
                        memory_bytes=memory[0],
                        used_bytes=memory[1],
                        compute_capability=capability,
                    )
                )
    return tuple(found)


def _read_amdsmi() -> Driver:
    try:
        import amdsmi
    except (ImportError, KeyError, OSError) as error:  # it loads the driver's library on import
        return Driver(trouble=str(error))
    try:
        amdsmi.amdsmi_init()
        handles = amdsmi.amdsmi_get_processor_handles()
        gpus = tuple(_amd_gpu(amdsmi, index, handle) for index, handle in enumerate(handles))
        return Driver(version=_amd_driver_version(amdsmi, handles), gpus=gpus)
    except amdsmi.AmdSmiException as error:
        return Driver(trouble=str(error))
    finally:
        with contextlib.suppress(amdsmi.AmdSmiException):
            amdsmi.amdsmi_shut_down()


def _amd_driver_version(smi: Any, handles: Sequence[Any]) -> str:
    return str(smi.amdsmi_get_gpu_driver_info(handles[0])["driver_version"]) if handles else ""


def _amd_gpu(smi: Any, index: int, handle: Any) -> Gpu:
    vram = smi.amdsmi_get_gpu_vram_usage(handle)  # in MiB
    return Gpu(
        index=index,
        kind="rocm",
        name=str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]),
        uuid=str(smi.amdsmi_get_gpu_device_uuid(handle)),
        memory_bytes=int(vram["vram_total"]) * 1024**2,
        used_bytes=int(vram["vram_used"]) * 1024**2,
    )


def _text(value: str | bytes) -> str:
    """Return text; older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value
