"""The devices that can run a training step, and the torch that is installed.

`torch_build` reads torch's files: importing it takes seconds. `find_tcmalloc` finds a library for a
trial to preload.
"""

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
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
    folder = Path(next(iter(spec.submodule_search_locations)))
    return read_build(folder) or TorchBuild(version=metadata.version("torch"))


def read_build(folder: Path) -> TorchBuild | None:
    """Return the build that `torch/version.py` describes; None where there is no such file."""
    path = folder / "version.py"
    if not path.is_file():
        return None
    constants = _constants(path.read_text())
    return TorchBuild(
        version=constants.get("__version__") or "",
        cuda=constants.get("cuda"),
        hip=constants.get("hip"),
    )


def _constants(source: str) -> dict[str, str | None]:
    """Return the module-level names that are bound to a literal text or None."""
    found: dict[str, str | None] = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and (
            value.value is None or isinstance(value.value, str)
        ):
            found |= {t.id: value.value for t in targets if isinstance(t, ast.Name)}
    return found


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


TCMALLOC = ("libtcmalloc_minimal.so*", "libtcmalloc.so*")
"""The allocator alone first: the full library brings a heap profiler that nothing here uses."""

PLACES = (
    "/usr/lib/{machine}-linux-gnu",
    "/lib/{machine}-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/opt/homebrew/lib",
)
"""Where Debian, Red Hat, a local build and Homebrew put libraries."""


def find_tcmalloc(folders: Sequence[Path] | None = None) -> str | None:
    """Return the path of an installed tcmalloc, or None."""
    places = tuple(_library_folders()) if folders is None else folders
    for pattern in TCMALLOC:
        for folder in places:
            for path in sorted(folder.glob(pattern)):
                if path.is_file():  # a dangling link is not
                    return str(path)
    return None


def _library_folders() -> Iterator[Path]:
    for text in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if text:
            yield Path(text)
    yield Path(sys.prefix) / "lib"
    for place in PLACES:
        yield Path(place.format(machine=os.uname().machine))
