"""Look at everything around a training that decides whether it runs, where, and how fast.

`doctor` asks all checks: where training lands and why on the CPU, what the host gives this process
(cores, memory, shared memory, files, disk), Python, torch and what they need.
"""

import os
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.hardware.load import Load, load_meter, process_tree
from flatout.hardware.system import disk_speed
from flatout.records.finding import BAD, OK, WARN, Check
from flatout.records.machine import Machine
from flatout.records.units import GIB, MIB, format_bytes, format_share

BUSY_SHARE = 0.05
"""Above a twentieth, someone else's work shows in step times."""

HELD_SHARE = 0.02
"""An idle driver holds below a hundredth of a GPU's memory; a CUDA context of someone more."""

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
    count = len(machine.devices)
    what = f"torch finds {count} x {machine.device.name}"
    variables = machine.facts.get("variables", {})
    if len(names) > 1 and "CUDA_DEVICE_ORDER" not in variables:
        return Check(
            status=WARN,
            what=f"{what} first; there are also {', '.join(sorted(names - {machine.device.name}))}",
            why="CUDA numbers unlike GPUs by speed, nvidia-smi by slot: the numbers do not agree",
            next="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    what = f"{what} ({format_bytes(machine.device.memory_bytes)})"
    if count == 1:
        return Check(status=OK, what=what)
    return Check(
        status=OK,
        what=what,
        why="a script that starts no processes of its own trains on one of them",
        next=f"flatout run --gpus {count} train.py trains it on all; flatout watch shows who works",
    )


def _unused_gpus(machine: Machine, gpus: str) -> Check:
    """Say why torch uses none of the GPUs, and what to do about it."""
    cause, facts = machine.unseen_because, machine.facts
    chosen = [f"{name}={value!r}" for name, value in machine.gpu_choice.items()]
    first = next(iter(machine.gpu_choice), "")
    what, why, advice = {
        "hidden": (
            f"hidden by {chosen[0]}" if chosen else "",
            "training lands on the CPU: every program started from here sees no GPU",
            f"unset {first}",
        ),
        "build": (
            f"but torch {machine.torch_version} is a build for the CPU only",
            "training lands on the CPU: torch.cuda.is_available() is False with this build",
            REINSTALL,
        ),
        "old": (
            "but its driver is too old for this torch",
            "training lands on the CPU: torch finds no GPU with this driver",
            "update the GPU driver, or install a torch for it",
        ),
        "unnamed": (
            f"none of them named by {', '.join(chosen)}",
            "training lands on the CPU: an entry that names no GPU ends the list",
            f"unset {first}, or name GPUs that nvidia-smi -L lists",
        ),
        "trouble": (
            f"but torch cannot use them: {facts.get('torch_trouble') or 'it does not say why'}",
            "training lands on the CPU or fails at the first .cuda()",
            "python -c 'import torch; torch.cuda.init()' shows torch's own error",
        ),
    }[cause]
    return Check(
        status=BAD,
        what=f"{gpus} here, {what}",
        why=why,
        next=advice,
    )


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


ROOMY_SHM_BYTES = 1 * GIB
"""Four workers, two batches each of 256 images at 224 pixels in fp32 (147 MiB) need 1.2 GiB."""

ENOUGH_FILES = 4096
"""A worker passes each tensor by one open file: 8 workers x 2 batches x 100 tensors = 1,600."""

SLOW_DISK_BYTES_PER_S = 100 * MIB
"""A spinning disk reads one file in a row about that fast, and small files far slower."""

LITTLE_DISK_BYTES = 5 * GIB
"""One checkpoint of a 400-million-parameter model with Adam's state is 4.5 GiB."""

DISTURBING_SHARE = 0.05
"""The limit above which a trial is thrown away, see docs/design.md."""


def cores(machine: Machine) -> Check:
    """Compare what libraries think they have with what the process may use."""
    seen, usable = machine.logical_cores, machine.usable_cores
    affinity, quota = machine.facts.get("affinity_cores", seen), machine.facts.get("quota_cores")
    if usable >= seen:
        return Check(status=OK, what=f"{usable} cores, all of them usable")
    cause = f"the affinity mask leaves {affinity}"
    if quota is not None and quota < affinity:
        cause = f"the cgroup's CPU quota is {quota:g}"
    return Check(
        status=WARN,
        what=f"{usable} of {seen} cores usable: {cause}",
        why=f"os.cpu_count() says {seen}; whoever starts that many threads or workers is throttled",
        next=f"num_workers up to {usable}; export OMP_NUM_THREADS={usable}",
    )


def threads(machine: Machine) -> Check | None:
    """Report a thread count in the environment that does not suit the cores."""
    text = machine.facts.get("variables", {}).get("OMP_NUM_THREADS", "")
    if not text.isdigit():
        return None
    count = int(text)
    if count <= machine.usable_cores and (count > 1 or machine.device.kind != "cpu"):
        return Check(status=OK, what=f"OMP_NUM_THREADS={count}")
    if count == 1 == machine.usable_cores:
        return Check(status=OK, what="OMP_NUM_THREADS=1 on one core")
    why = "threads wait for each other on too few cores" if count > 1 else "one core does the work"
    return Check(
        status=WARN,
        what=f"OMP_NUM_THREADS={count} on {machine.usable_cores} usable cores",
        why=why,
        next=f"export OMP_NUM_THREADS={machine.usable_cores}",
    )


def memory(machine: Machine) -> Check:
    """Report the memory limit and swap in use."""
    facts = machine.facts
    limited = facts.get("memory_limit_bytes") is not None
    what = f"{format_bytes(machine.memory_bytes)} of memory{' (cgroup limit)' if limited else ''}"
    used = facts.get("swap_used_bytes", 0)
    if used < machine.memory_bytes / 100:
        return Check(status=OK, what=f"{what}, no swap in use")
    return Check(
        status=WARN,
        what=f"{what}, {format_bytes(used)} swapped out",
        why="a page that has to come back from disk stalls the step that touches it",
        next="close what holds the memory; fewer workers and a smaller prefetch_factor need less",
    )


def shared_memory(machine: Machine) -> Check | None:
    """Report a /dev/shm that loader workers would overrun."""
    if not machine.facts.get("system", "").startswith("Linux"):
        return None
    size, free = machine.facts.get("shm_bytes", 0), machine.shm_free_bytes
    if free >= ROOMY_SHM_BYTES:
        return Check(status=OK, what=f"/dev/shm: {format_bytes(free)} free")
    return Check(
        status=BAD if not size else WARN,
        what=f"/dev/shm: {format_bytes(free)} free of {format_bytes(size)}"
        if size
        else "no /dev/shm",
        why="loader workers hand batches over through it; when it is full they die of 'Bus error'",
        next="docker run --shm-size=8g (or --ipc=host); until then few workers, small prefetch",
    )


def open_files(machine: Machine) -> Check | None:
    """Report a limit on open files that loader workers would reach."""
    soft, hard = machine.facts.get("open_files_soft"), machine.facts.get("open_files_hard")
    if soft is None or hard is None:
        return None
    if soft < 0 or soft >= ENOUGH_FILES:
        return Check(status=OK, what=f"open files: limit {'none' if soft < 0 else soft}")
    reachable = ENOUGH_FILES if hard < 0 else min(hard, ENOUGH_FILES)
    return Check(
        status=WARN,
        what=f"open files: limit {soft}",
        why="each tensor of a waiting batch is one open file: 'received 0 items of ancdata'",
        next=f"ulimit -n {reachable}" if reachable > soft else "ask for a higher hard limit",
    )


def huge_pages(machine: Machine) -> Check | None:
    """Report huge pages that are switched off."""
    mode = machine.facts.get("huge_pages", "")
    if not mode:
        return None
    if mode != "never":
        return Check(status=OK, what=f"transparent huge pages: {mode}")
    return Check(
        status=WARN,
        what="transparent huge pages: never",
        why="big activations come in 4 KiB pages, one page fault each",
        next="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled   (as root)",
    )


def disk(folder: Path) -> Check:
    """Measure a short write and read, and report slow or full disks."""
    try:
        speed = disk_speed(folder)
    except OSError as error:
        return Check(
            status=BAD,
            what=f"{folder} cannot be written: {error.strerror or error}",
            why="checkpoints and flatout's own results could not be saved there",
            next="free some space, or set TMPDIR to a folder that can be written",
        )
    what = (
        f"{folder}: reads {format_bytes(speed.read_bytes_per_s)}/s, "
        f"writes {format_bytes(speed.write_bytes_per_s)}/s, {format_bytes(speed.free_bytes)} free "
        f"({format_bytes(speed.probe_bytes)} probe)"
    )
    if speed.free_bytes < LITTLE_DISK_BYTES:
        return Check(
            status=WARN,
            what=what,
            why="a few checkpoints fill the disk, and a save that fails half-way is lost",
            next="free some space before a long training",
        )
    if speed.read_bytes_per_s < SLOW_DISK_BYTES_PER_S:
        return Check(
            status=WARN,
            what=what,
            why="data sets read from here will starve the device",
            next="copy the data to a local disk, or into one packed file",
        )
    return Check(status=OK, what=what)


def quiet(load: Load) -> Check:
    """Report that others are using the cores right now."""
    if load.foreign_share <= DISTURBING_SHARE and load.steal_share <= DISTURBING_SHARE:
        return Check(status=OK, what="the cores are free for measuring")
    return Check(
        status=WARN,
        what=f"others use {format_share(load.foreign_share)} of the cores now"
        f" ({format_share(load.steal_share)} is taken by other virtual machines)",
        why="trials beside foreign load are thrown away and repeated, so tuning takes longer",
        next="stop the other work while tuning",
    )


OLDEST_TORCH = (2, 9)
"""As in the package's own requirements: older ones lack hooks that the hook points stand on."""

SLOWING_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for: fit for finding a fault, not for training",
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing",
}


def versions(machine: Machine) -> Check:
    """Report a torch that is missing or too old."""
    python = machine.facts.get("python", "")
    if not machine.torch_version:
        return Check(
            status=BAD,
            what=f"Python {python}, no torch",
            why="there is nothing to train with in this environment",
            next="activate the environment your training uses, or: pip install torch",
        )
    what = f"Python {python}, torch {machine.torch_version}"
    found = tuple(int(part) for part in machine.torch_version.split(".")[:2] if part.isdigit())
    if found < OLDEST_TORCH:
        return Check(
            status=BAD,
            what=what,
            why=f"flatout needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer",
            next="pip install --upgrade torch",
        )
    return Check(status=OK, what=what)


def compiler(machine: Machine) -> Check:
    """Report what torch.compile would miss: a C++ compiler or Python's headers."""
    found = machine.facts.get("compiler")
    if not found:
        return Check(
            status=WARN,
            what="no C++ compiler (g++ or clang++)",
            why="torch.compile fails on the CPU, and on a GPU where Triton builds its launcher",
            next="apt-get install g++   (or set CXX)",
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return Check(
            status=WARN,
            what=f"{found}, but no Python headers ({header} is missing)",
            why="torch.compile builds small Python extensions and fails without them",
            next="apt-get install python3-dev   (the one of this Python version)",
        )
    return Check(status=OK, what=f"torch.compile can use {found}")


def allocator(machine: Machine) -> Check | None:
    """Report a missing tcmalloc where training runs on the CPU."""
    if machine.device.kind != "cpu":
        return None
    if machine.tcmalloc_path:
        return Check(status=OK, what=f"tcmalloc: {machine.tcmalloc_path}")
    return Check(
        status=WARN,
        what="tcmalloc is not installed",
        why="a faster allocator, worth trying for training on the CPU, is not available",
        next="apt-get install libtcmalloc-minimal4",
    )


def variables(machine: Machine) -> Check | None:
    """Report environment variables that slow training down."""
    found = machine.facts.get("variables", {})
    slowing = [name for name in SLOWING_VARIABLES if found.get(name, "0") not in ("", "0")]
    if not slowing:
        return None
    return Check(
        status=WARN,
        what=", ".join(f"{name}={found[name]}" for name in slowing),
        why="; ".join(SLOWING_VARIABLES[name] for name in slowing),
        next=f"unset {' '.join(slowing)}",
    )


CHECKS = (
    training_device,
    driver_fits,
    busy_gpus,
    versions,
    variables,
    cores,
    threads,
    memory,
    shared_memory,
    open_files,
    huge_pages,
    compiler,
    allocator,
)
"""The checks that only read the machine's record, most decisive first."""

LISTEN_S = 0.5
"""Fifty of the kernel's ticks: one tick off is 2 % of one core."""


def doctor(machine: Machine, *, folder: Path | None = None) -> tuple[Check, ...]:
    """Return what was found, most decisive first. Takes a second or two: the disk is measured.

    Args:
        machine: What `read_machine` returned.
        folder: Where the disk is measured; the temporary folder if not given.
    """
    found = [check(machine) for check in CHECKS]
    found.append(disk(folder or Path(tempfile.gettempdir())))
    found.append(quiet(_listen()))
    return tuple(check for check in found if check is not None)


def _listen() -> Load:
    meter = load_meter()
    own = process_tree(os.getpid())
    before = meter.read(own)
    time.sleep(LISTEN_S)
    return meter.between(before, meter.read(own))
