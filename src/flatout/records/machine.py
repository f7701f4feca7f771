"""Hardware and software of one measurement: what they can do, and what a container must hold."""

from dataclasses import dataclass, field
from typing import Any

GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
HIDES_ALL = ("", "-1")
"""Values of `CUDA_VISIBLE_DEVICES` and its like that leave no GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device that can run the training step."""

    kind: str
    """`cpu`, `cuda` (NVIDIA), `rocm`, `mps` or `xpu`."""
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int] | None = None
    """NVIDIA only, as (major, minor)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this process may use, after affinity, cgroup quota and mounts are taken into account."""

    device: Device
    """The device a training script finds first: an accelerator if torch sees one, else the CPU."""
    devices: tuple[Device, ...] = ()
    """Every accelerator torch sees; empty on a CPU-only machine."""
    cpu_name: str = ""
    logical_cores: int
    """Cores of the host, as the kernel counts them."""
    usable_cores: int
    """Cores this process may really use: affinity and cgroup quota, rounded down, at least 1."""
    physical_cores: int
    """Physical cores among the usable ones."""
    memory_bytes: int
    """Host memory, or the cgroup's limit where that is lower."""
    shm_free_bytes: int
    """Free bytes in /dev/shm, where loader workers put their batches."""
    cpu_features: frozenset[str] = frozenset()
    """The lower-case flags that matter here, such as `avx2`, `avx512_bf16` and `amx_fp16`."""
    tcmalloc_path: str | None = None
    torch_version: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further readings for `doctor` and the environment record; plain JSON values."""

    @property
    def gpu_choice(self) -> dict[str, str]:
        """The variables that choose among the GPUs, those that hide all of them first."""
        variables = self.facts.get("variables", {}).items()
        chosen = [(k, v) for k, v in variables if k.endswith("VISIBLE_DEVICES")]
        return dict(sorted(chosen, key=lambda item: item[1] not in HIDES_ALL))

    @property
    def unseen_because(self) -> str:
        """Why torch uses none of the GPUs that are here, the first cause from the outside in.

        `driver` (none answers), `hidden` (by an empty variable), `build` (for the CPU only), `old`
        (the driver, for this build), `unnamed` (a variable names none of them), `trouble` (torch's
        own), or "" where torch sees one or none is here.
        """
        facts = self.facts
        built, runs = facts.get("torch_cuda"), facts.get("driver_cuda")
        if self.devices or not (facts.get("gpus") or facts.get("pci_gpus")):
            return ""
        causes = {
            "driver": not facts.get("gpus"),
            "hidden": any(value in HIDES_ALL for value in self.gpu_choice.values()),
            "build": not built and not facts.get("torch_hip"),
            "old": built and runs and int(runs.split(".")[0]) < int(built.split(".")[0]),
            "unnamed": self.gpu_choice,
        }
        return next((cause for cause, holds in causes.items() if holds), "trouble")

    @property
    def has_fast_cpu_bf16(self) -> bool:
        """Whether the CPU multiplies bf16 in hardware."""
        return bool(self.cpu_features & {"avx512_bf16", "amx_bf16", "bf16"})

    @property
    def has_fast_cpu_fp16(self) -> bool:
        """Whether the CPU multiplies fp16 in hardware."""
        return bool(self.cpu_features & {"avx512_fp16", "amx_fp16", "asimdhp"})


ARCHIVES = (".whl", ".tar.gz")
"""What pip installs from a file, named so that it can tell what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The software of one measurement, ready to be written as a Dockerfile."""

    kind: str
    """`cpu`, `cuda` or `rocm`."""
    torch: str
    """Version of torch, without the build's suffix."""
    index: str
    """Package index that has this build of torch."""
    python: str
    """Version that was measured, as `3.12`: the image has it."""
    flatout: str
    shm_gib: int
    """Shared memory for the batches of loader workers."""
    recipe: str = ""
    """File name of the recipe, alongside the Dockerfile; empty for none."""
    source: str = ""
    """A wheel or a folder alongside the Dockerfile, or an address, to install flatout from."""
    extras: tuple[str, ...] = ()
    """Extras of flatout that the recipe's techniques need."""
    requirements: str = ""
    """File name of the script's own requirements, alongside the Dockerfile; empty for none."""
    script: str = "train.py"
    about: str = ""
    """Where the stack was measured."""
