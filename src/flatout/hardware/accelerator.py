"""The devices that can run a training step."""

from collections.abc import Sequence
from typing import Any

from flatout.core.machine import Device
from flatout.hardware.gpus import Driver, Gpu, visible
from flatout.hardware.torch_build import TorchBuild


def devices_of(driver: Driver, build: TorchBuild) -> tuple[Device, ...]:
    """Return the accelerators that torch will find, as far as build and driver tell.

    Torch itself is not asked, so a build that is too new for the driver is not noticed here;
    `devices_by_torch` and `flatout doctor` do.
    """
    if build.cuda is None and build.hip is None:
        return ()
    kind = "rocm" if build.hip else "cuda"
    return tuple(_device(gpu) for gpu in visible(driver.gpus) if gpu.kind == kind)


def devices_by_torch(driver: Driver) -> tuple[Device, ...]:
    """Return the accelerators that torch finds. Imports torch; makes no context if it can."""
    import torch

    if torch.cuda.is_available():
        return cuda_devices(torch, visible(driver.gpus))
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return tuple(_xpu_device(torch, index) for index in range(torch.xpu.device_count()))
    if torch.backends.mps.is_available():
        size = int(torch.mps.recommended_max_memory())
        return (Device(kind="mps", name="Apple GPU", memory_bytes=size),)
    return ()


def trouble_with_cuda() -> str:
    """Return why torch finds no CUDA device, in torch's own words; empty if it finds one."""
    import torch

    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        return str(error).partition("\n")[0]
    return "torch sees no device"


def cuda_devices(torch: Any, gpus: Sequence[Gpu]) -> tuple[Device, ...]:
    """Return the GPUs that torch counts, described by the driver where it counts the same."""
    count = torch.cuda.device_count()
    if count == len(gpus) and all(gpu.memory_bytes for gpu in gpus):  # and without a context
        return tuple(_device(gpu) for gpu in gpus)
    kind = "rocm" if torch.version.hip else "cuda"
    found = []
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        capability = (facts.major, facts.minor) if kind == "cuda" else None
        found.append(
            Device(
                kind=kind,
                name=facts.name,
                memory_bytes=facts.total_memory,
                compute_capability=capability,
            )
        )
    return tuple(found)


def _xpu_device(torch: Any, index: int) -> Device:
    facts = torch.xpu.get_device_properties(index)
    return Device(kind="xpu", name=facts.name, memory_bytes=facts.total_memory)


def _device(gpu: Gpu) -> Device:
    return Device(
        kind=gpu.kind,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        compute_capability=gpu.compute_capability,
    )
