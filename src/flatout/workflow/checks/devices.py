"""Where training will run, and why it would land on the CPU."""

from collections.abc import Mapping
from typing import Any

from flatout.core.check import BAD, OK, WARN, Check
from flatout.core.machine import Machine
from flatout.core.units import format_bytes, format_share

BUSY_SHARE = 0.05
"""Above a twentieth, somebody else's work shows in step times."""

HELD_SHARE = 0.02
"""An idle driver holds below a hundredth of a GPU's memory; a CUDA context of somebody more."""

REINSTALL = "pip uninstall torch, then install it with the command that pytorch.org gives for CUDA"


def training_device(machine: Machine) -> Check:
    """Say where training lands, and if that is the CPU, the exact cause."""
    if machine.devices:
        return _on_accelerator(machine)
    gpus = machine.facts.get("gpus", [])
    if gpus:
        return _unused_gpus(machine, f"{len(gpus)} x {gpus[0]['name']}")
    if slots := machine.facts.get("pci_gpus", 0):
        trouble = machine.facts.get("driver_trouble") or "no driver answered"
        return Check(
            status=BAD,
            what=f"{slots} GPU in a slot, and no driver for it ({trouble})",
            why="training lands on the CPU: without its driver, no program can use the GPU",
            next="install or load the GPU's driver; in a container, start it with --gpus all",
        )
    none = "no GPU"
    if built := machine.facts.get("torch_cuda"):
        none = f"no GPU and no driver for this torch, built for CUDA {built}"
    fast = "multiplies bf16 in hardware" if machine.has_fast_cpu_bf16 else "has no bf16 units"
    return Check(
        status=OK, what=f"{none}: training runs on the CPU ({machine.device.name}, {fast})"
    )


def driver_fits(machine: Machine) -> Check | None:
    """Compare the CUDA version torch was built with to the newest one the driver runs."""
    built, runs = machine.facts.get("torch_cuda"), machine.facts.get("driver_cuda")
    if not built or not runs:
        return None
    build, driver = _version(built), _version(runs)
    if driver >= build:
        return Check(status=OK, what=f"driver runs CUDA up to {runs}, torch was built with {built}")
    what = f"the driver runs CUDA up to {runs}, but torch was built with {built}"
    if driver[0] == build[0]:
        return Check(
            status=WARN,
            what=what,
            why="the same major version works, but kernels that are compiled on the spot may not",
            next=f"update the GPU driver to one for CUDA {built} or newer",
        )
    return Check(
        status=BAD,
        what=what,
        why="torch finds no GPU with this driver, so training lands on the CPU or fails",
        next=f"update the GPU driver, or install a torch built for CUDA {driver[0]}",
    )


def busy_gpus(machine: Machine) -> Check | None:
    """Report GPUs that other processes are using."""
    gpus = machine.facts.get("gpus", [])
    busy = [_sentence(gpu) for gpu in gpus if _is_busy(gpu)]
    if not gpus:
        return None
    if not busy:
        return Check(status=OK, what=f"{len(gpus)} GPU, none in use by others")
    return Check(
        status=WARN,
        what="; ".join(busy),
        why="step times and free memory depend on what the others do: measurements mean little",
        next="wait, or choose another GPU with CUDA_VISIBLE_DEVICES",
    )


def _on_accelerator(machine: Machine) -> Check:
    names = {device.name for device in machine.devices}
    what = f"training runs on {len(machine.devices)} x {machine.device.name}"
    variables = machine.facts.get("variables", {})
    if len(names) > 1 and "CUDA_DEVICE_ORDER" not in variables:
        return Check(
            status=WARN,
            what=f"{what} first; there are also {', '.join(sorted(names - {machine.device.name}))}",
            why="CUDA numbers unlike GPUs by speed, nvidia-smi by slot: the numbers do not agree",
            next="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    return Check(status=OK, what=f"{what} ({format_bytes(machine.device.memory_bytes)})")


def _unused_gpus(machine: Machine, gpus: str) -> Check:
    """Name the first cause, from the outside in: hidden, not built for, not working."""
    facts = machine.facts
    hiding = [name for name in _hiding_variables(facts) if facts["variables"][name] in ("", "-1")]
    if hiding:
        name = hiding[0]
        return Check(
            status=BAD,
            what=f"{gpus} here, hidden by {name}={facts['variables'][name]!r}",
            why="training lands on the CPU: every program started from here sees no GPU",
            next=f"unset {name}",
        )
    if facts.get("torch_cuda") is None and facts.get("torch_hip") is None:
        return Check(
            status=BAD,
            what=f"{gpus} here, but torch {machine.torch_version} is a build for the CPU only",
            why="training lands on the CPU: torch.cuda.is_available() is False with this build",
            next=REINSTALL,
        )
    if chosen := _hiding_variables(facts):
        given = ", ".join(f"{name}={facts['variables'][name]}" for name in chosen)
        return Check(
            status=BAD,
            what=f"{gpus} here, none of them named by {given}",
            why="training lands on the CPU: an entry that names no GPU ends the list",
            next=f"unset {chosen[0]}, or name GPUs that nvidia-smi -L lists",
        )
    return Check(
        status=BAD,
        what=f"{gpus} here, but torch cannot use them: "
        f"{facts.get('torch_trouble') or 'it does not say why'}",
        why="training lands on the CPU or fails at the first .cuda()",
        next="python -c 'import torch; torch.cuda.init()' shows torch's own error",
    )


def _hiding_variables(facts: Mapping[str, Any]) -> list[str]:
    return [name for name in facts.get("variables", {}) if name.endswith("VISIBLE_DEVICES")]


def _is_busy(gpu: Mapping[str, Any]) -> bool:
    held = gpu["used_bytes"] / gpu["memory_bytes"] if gpu["memory_bytes"] else 0.0
    return bool(gpu["pids"]) or (gpu["busy_share"] or 0.0) > BUSY_SHARE or held > HELD_SHARE


def _sentence(gpu: Mapping[str, Any]) -> str:
    busy = f"{format_share(gpu['busy_share'])} busy, " if gpu["busy_share"] is not None else ""
    pids = ", ".join(str(pid) for pid in gpu["pids"])
    by = f", by process {pids}" if pids else ""
    return f"GPU {gpu['index']}: {busy}{format_bytes(gpu['used_bytes'])} held{by}"


def _version(text: str) -> tuple[int, ...]:
    """Return the comparable parts.

    >>> _version("12.8") < _version("13.0")
    True
    """
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
