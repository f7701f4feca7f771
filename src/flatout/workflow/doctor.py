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
from flatout.records.messages import Text, joined, words
from flatout.records.units import GIB, MIB, format_bytes, format_share

BUSY_SHARE = 0.05
"""Above a twentieth, someone else's work shows in step times."""
HELD_SHARE = 0.02
"""An idle driver holds below a hundredth of a GPU's memory; a CUDA context of someone more."""
REINSTALL = "finding.unseen_gpu.next_build"
"""The message that says which torch to install."""
SILENT = "finding.unseen_gpu.no_reason"
"""The message for a torch that gives no reason."""


def training_device(machine: Machine) -> Check:
    """Say where training lands, and if that is the CPU, the exact cause."""
    if machine.devices:
        return _on_accelerator(machine)
    gpus = machine.facts.get("gpus", [])
    if gpus:
        return _unused_gpus(machine, f"{len(gpus)} x {gpus[0]['name']}")
    if slots := machine.facts.get("pci_gpus", 0):
        trouble = machine.facts.get("driver_trouble") or words("doctor.driver_silent")
        what = words("doctor.no_driver", gpus=str(slots), why=trouble)
        return _found("no_driver", what, words("finding.unseen_gpu.next_driver"), status=BAD)
    none = words("doctor.no_gpu")
    if built := machine.facts.get("torch_cuda"):
        none = words("doctor.no_gpu_for_cuda", built=built)
    fast = words("doctor.has_bf16" if machine.has_fast_cpu_bf16 else "doctor.has_no_bf16")
    what = words("doctor.on_cpu", none=none, cpu=machine.device.name, bf16=fast)
    return Check(status=OK, what=what)


def driver_fits(machine: Machine) -> Check | None:
    """Compare the CUDA version torch was built with to the newest one the driver runs."""
    built, runs = machine.facts.get("torch_cuda"), machine.facts.get("driver_cuda")
    if not built or not runs:
        return None
    build, driver = _version(built), _version(runs)
    if driver >= build:
        return Check(status=OK, what=words("doctor.driver_fits", runs=runs, built=built))
    what = words("doctor.driver_old", runs=runs, built=built)
    if driver[0] == build[0]:
        return Check(
            status=WARN,
            what=what,
            why=words("doctor.driver_minor"),
            next=words("doctor.driver_newer", built=built),
        )
    return Check(
        status=BAD,
        what=what,
        why=words("doctor.driver_major"),
        next=words("doctor.driver_or_torch", cuda=str(driver[0])),
    )


def busy_gpus(machine: Machine) -> Check | None:
    """Report GPUs that other processes are using."""
    gpus = machine.facts.get("gpus", [])
    busy = [_sentence(gpu) for gpu in gpus if _is_busy(gpu)]
    if not gpus:
        return None
    if not busy:
        return Check(status=OK, what=words("doctor.gpus_free", n=str(len(gpus))))
    return _found("gpus_busy", joined(*busy))


def _on_accelerator(machine: Machine) -> Check:
    names = {device.name for device in machine.devices}
    count = len(machine.devices)
    what = words("doctor.torch_finds", n=str(count), gpu=machine.device.name)
    variables = machine.facts.get("variables", {})
    if len(names) > 1 and "CUDA_DEVICE_ORDER" not in variables:
        others = ", ".join(sorted(names - {machine.device.name}))
        what = words("doctor.unlike_gpus", first=what, others=others)
        return _found("unlike_gpus", what, "export CUDA_DEVICE_ORDER=PCI_BUS_ID")
    size = format_bytes(machine.device.memory_bytes)
    what = words("doctor.with_memory", what=what, size=size)
    if count == 1:
        return Check(status=OK, what=what)
    all_gpus = words("doctor.all_gpus", n=str(count))
    return Check(status=OK, what=what, why=words("doctor.one_of_gpus"), next=all_gpus)


def _unused_gpus(machine: Machine, gpus: str) -> Check:
    """Say why torch uses none of the GPUs, and what to do about it."""
    cause, facts = machine.unseen_because, machine.facts
    chosen = [f"{name}={value!r}" for name, value in machine.gpu_choice.items()]
    first = next(iter(machine.gpu_choice), "")
    known: dict[str, tuple[str, dict[str, Text], str]] = {
        "hidden": ("hidden", {"by": chosen[0] if chosen else ""}, f"unset {first}"),
        "build": ("cpu_build", {"torch": machine.torch_version}, words(REINSTALL)),
        "old": ("old_driver", {}, ""),
        "unnamed": (
            "unnamed",
            {"by": ", ".join(chosen)},
            words("finding.unseen_gpu.next_hidden", variable=first),
        ),
        "trouble": ("unusable", {"why": facts.get("torch_trouble") or words(SILENT)}, ""),
    }
    name, fields, advice = known[cause]
    what = words("doctor.gpus_here", gpus=gpus, what=words(f"doctor.{name}", **fields))
    return _found(name, what, advice, status=BAD)


def _found(name: str, what: str, advice: str = "", *, status: str = WARN, **fields: Text) -> Check:
    """Return a check that found something, with the messages that `name` has for it."""
    advice = advice or words(f"doctor.{name}_next", **fields)
    return Check(status=status, what=what, why=words(f"doctor.{name}_why", **fields), next=advice)


def _is_busy(gpu: Mapping[str, Any]) -> bool:
    held = gpu["used_bytes"] / gpu["memory_bytes"] if gpu["memory_bytes"] else 0.0
    return bool(gpu["pids"]) or (gpu["busy_share"] or 0.0) > BUSY_SHARE or held > HELD_SHARE


def _sentence(gpu: Mapping[str, Any]) -> str:
    share, pids = gpu["busy_share"], ", ".join(str(pid) for pid in gpu["pids"])
    parts = [words("doctor.held", size=format_bytes(gpu["used_bytes"]))]
    if share is not None:
        parts.insert(0, words("doctor.busy", share=format_share(share)))
    if pids:
        parts.append(words("doctor.held_by", processes=pids))
    return words("doctor.gpu", n=str(gpu["index"]), parts=tuple(parts))


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
        return Check(status=OK, what=words("doctor.all_cores", n=str(usable)))
    cause = words("doctor.affinity", n=str(affinity))
    if quota is not None and quota < affinity:
        cause = words("doctor.quota", n=f"{quota:g}")
    n, of = str(usable), str(seen)
    return _found("some_cores", words("doctor.some_cores", n=n, of=of, why=cause), n=n, of=of)


def threads(machine: Machine) -> Check | None:
    """Report a thread count in the environment that does not suit the cores."""
    text = machine.facts.get("variables", {}).get("OMP_NUM_THREADS", "")
    if not text.isdigit():
        return None
    count = int(text)
    if count <= machine.usable_cores and (count > 1 or machine.device.kind != "cpu"):
        return Check(status=OK, what=f"OMP_NUM_THREADS={count}")
    if count == 1 == machine.usable_cores:
        return Check(status=OK, what=words("doctor.one_thread"))
    why = words("doctor.many_threads" if count > 1 else "doctor.few_threads")
    return Check(
        status=WARN,
        what=words("doctor.threads", n=str(count), cores=str(machine.usable_cores)),
        why=why,
        next=f"export OMP_NUM_THREADS={machine.usable_cores}",
    )


def memory(machine: Machine) -> Check:
    """Report the memory limit and swap in use."""
    facts = machine.facts
    limited = facts.get("memory_limit_bytes") is not None
    name = "doctor.memory_limit" if limited else "doctor.memory"
    what = words(name, size=format_bytes(machine.memory_bytes))
    used = facts.get("swap_used_bytes", 0)
    if used < machine.memory_bytes / 100:
        return Check(status=OK, what=words("doctor.no_swap", memory=what))
    return _found("swap", words("doctor.swap", memory=what, size=format_bytes(used)))


def shared_memory(machine: Machine) -> Check | None:
    """Report a /dev/shm that loader workers would overrun."""
    if not machine.facts.get("system", "").startswith("Linux"):
        return None
    size, free = machine.facts.get("shm_bytes", 0), machine.shm_free_bytes
    if free >= ROOMY_SHM_BYTES:
        return Check(status=OK, what=words("doctor.shm", free=format_bytes(free)))
    if not size:
        return _found("shm", words("doctor.no_shm"), status=BAD)
    return _found("shm", words("doctor.shm_of", free=format_bytes(free), size=format_bytes(size)))


def open_files(machine: Machine) -> Check | None:
    """Report a limit on open files that loader workers would reach."""
    soft, hard = machine.facts.get("open_files_soft"), machine.facts.get("open_files_hard")
    if soft is None or hard is None:
        return None
    if soft < 0 or soft >= ENOUGH_FILES:
        n = words("doctor.no_limit") if soft < 0 else str(soft)
        return Check(status=OK, what=words("doctor.open_files", n=n))
    reachable = ENOUGH_FILES if hard < 0 else min(hard, ENOUGH_FILES)
    advice = f"ulimit -n {reachable}" if reachable > soft else words("doctor.hard_limit")
    return _found("open_files", words("doctor.open_files", n=str(soft)), advice)


def huge_pages(machine: Machine) -> Check | None:
    """Report huge pages that are switched off."""
    mode = machine.facts.get("huge_pages", "")
    if not mode:
        return None
    what = words("doctor.huge_pages", mode=mode)
    return Check(status=OK, what=what) if mode != "never" else _found("huge_pages", what)


def disk(folder: Path) -> Check:
    """Measure a short write and read, and report slow or full disks."""
    try:
        speed = disk_speed(folder)
    except OSError as error:
        why = str(error.strerror or error)
        what = words("doctor.no_writing", folder=str(folder), why=why)
        return _found("no_writing", what, status=BAD)
    what = words(
        "doctor.disk",
        folder=str(folder),
        read=format_bytes(speed.read_bytes_per_s),
        write=format_bytes(speed.write_bytes_per_s),
        free=format_bytes(speed.free_bytes),
        probe=format_bytes(speed.probe_bytes),
    )
    if speed.free_bytes < LITTLE_DISK_BYTES:
        return _found("little_disk", what)
    if speed.read_bytes_per_s < SLOW_DISK_BYTES_PER_S:
        return _found("slow_disk", what)
    return Check(status=OK, what=what)


def quiet(load: Load) -> Check:
    """Report that others are using the cores right now."""
    if load.foreign_share <= DISTURBING_SHARE and load.steal_share <= DISTURBING_SHARE:
        return Check(status=OK, what=words("doctor.quiet"))
    share, steal = format_share(load.foreign_share), format_share(load.steal_share)
    return _found("loaded", words("doctor.loaded", share=share, steal=steal))


OLDEST_TORCH = (2, 9)
"""As in the package's own requirements: older ones lack hooks that the hook points stand on."""
SLOWING_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "doctor.blocking",
    "TORCH_COMPILE_DISABLE": "doctor.not_compiling",
}
"""Each with the message that says what it does."""


def versions(machine: Machine) -> Check:
    """Report a torch that is missing or too old."""
    python = machine.facts.get("python", "")
    if not machine.torch_version:
        return _found("no_torch", words("doctor.no_torch", python=python), status=BAD)
    what = f"Python {python}, torch {machine.torch_version}"
    if _version(machine.torch_version) < OLDEST_TORCH:
        return Check(
            status=BAD,
            what=what,
            why=words("doctor.old_torch", version=".".join(map(str, OLDEST_TORCH))),
            next="pip install --upgrade torch",
        )
    return Check(status=OK, what=what)


def compiler(machine: Machine) -> Check:
    """Report what torch.compile would miss: a C++ compiler or Python's headers."""
    found = machine.facts.get("compiler")
    if not found:
        return _found("no_compiler", words("doctor.no_compiler"))
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        what = words("doctor.no_headers", compiler=found, header=str(header))
        return _found("no_headers", what)
    return Check(status=OK, what=words("doctor.compiler", compiler=found))


def allocator(machine: Machine) -> Check | None:
    """Report a missing tcmalloc where training runs on the CPU."""
    if machine.device.kind != "cpu":
        return None
    if machine.tcmalloc_path:
        return Check(status=OK, what=f"tcmalloc: {machine.tcmalloc_path}")
    advice = "apt-get install libtcmalloc-minimal4"
    return _found("no_tcmalloc", words("doctor.no_tcmalloc"), advice)


def variables(machine: Machine) -> Check | None:
    """Report environment variables that slow training down."""
    found = machine.facts.get("variables", {})
    slowing = [name for name in SLOWING_VARIABLES if found.get(name, "0") not in ("", "0")]
    if not slowing:
        return None
    return Check(
        status=WARN,
        what=", ".join(f"{name}={found[name]}" for name in slowing),
        why=joined(*(words(SLOWING_VARIABLES[name]) for name in slowing)),
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
    """Return what was found, most decisive first. Takes a second or two: the disk is measured."""
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
