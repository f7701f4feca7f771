"""The devices that can run a training step, and the torch that is installed.

`torch_build` reads torch's files: importing it takes seconds. `find_tcmalloc` finds a library for a
trial to preload.
"""

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.hardware.gpus import Driver, Gpu, visible
from flatout.records.machine import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The torch that `import torch` would load."""

    version: str
    """Empty when torch is not installed."""
    cuda: str | None = None
    """CUDA version it was built with; None for a build without CUDA."""
    hip: str | None = None
    """ROCm's HIP version it was built with."""

    @property
    def is_cpu_only(self) -> bool:
        """Whether the build cannot use an NVIDIA or AMD GPU whatever the machine has."""
        return self.cuda is None and self.hip is None


def torch_build() -> TorchBuild:
    """Return what is known of the installed torch without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return TorchBuild(version="")
    return read_build(Path(next(iter(spec.submodule_search_locations))))


def read_build(folder: Path) -> TorchBuild:
    """Return the build that `torch/version.py` describes: constants, and no import of torch."""
    path = folder / "version.py"
    known = runpy.run_path(str(path)) if path.is_file() else {}
    return TorchBuild(
        version=known.get("__version__", ""), cuda=known.get("cuda"), hip=known.get("hip")
    )


def devices_of(driver: Driver, build: TorchBuild) -> tuple[Device, ...]:
    """Return the accelerators that torch will find, as far as build and driver tell.

    Torch itself is not asked, so a build that is too new for the driver is not noticed here;
    `devices_by_torch` and `flatout doctor` do.
    """
    if build.cuda is None:
        return ()
    return tuple(_device(gpu) for gpu in visible(driver.gpus))


def devices_by_torch(driver: Driver) -> tuple[Device, ...]:
    """Return the accelerators that torch finds. Imports torch; makes no context if it can."""
    import torch

    if torch.cuda.is_available():
        return cuda_devices(torch, visible(driver.gpus))
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return _described(torch.xpu, "xpu")
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
    return _described(torch.cuda, "rocm" if torch.version.hip else "cuda")


def _described(backend: Any, kind: str) -> tuple[Device, ...]:
    """Return the devices of one of torch's modules, such as `torch.cuda`, as it describes them."""
    all_facts = map(backend.get_device_properties, range(backend.device_count()))
    return tuple(
        Device(
            kind=kind,
            name=facts.name,
            memory_bytes=facts.total_memory,
            compute_capability=(facts.major, facts.minor) if kind == "cuda" else None,
        )
        for facts in all_facts
    )


def _device(gpu: Gpu) -> Device:
    return Device(
        kind=gpu.kind,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        compute_capability=gpu.compute_capability,
    )


TCMALLOC = ("libtcmalloc_minimal.so*", "libtcmalloc.so*")
"""The allocator alone first: the full library brings a heap profiler that nothing here uses."""

PLACES = (
    *("/usr/lib/{machine}-linux-gnu", "/lib/{machine}-linux-gnu", "/usr/lib64"),
    *("/usr/lib", "/usr/local/lib", "/opt/homebrew/lib"),
)
"""Where Debian, Red Hat, a local build and Homebrew put libraries."""


def find_tcmalloc(folders: Sequence[Path] | None = None) -> str | None:
    """Return the path of an installed tcmalloc, or None."""
    if folders is None:
        chosen = [text for text in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if text]
        places = [place.format(machine=os.uname().machine) for place in PLACES]
        folders = [Path(text) for text in (*chosen, f"{sys.prefix}/lib", *places)]
    for pattern in TCMALLOC:
        for folder in folders:
            for path in sorted(folder.glob(pattern)):
                if path.is_file():  # a dangling link is not
                    return str(path)
    return None
