"""Python, torch and what they need beside them."""

import sysconfig
from pathlib import Path

from flatout.core.check import BAD, OK, WARN, Check
from flatout.core.machine import Machine

OLDEST_TORCH = (2, 9)
"""As in the package's own requirements: older ones lack hooks that the seams stand on."""

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
        why="the lever cpu_allocator, worth trying on the CPU, has nothing to use",
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
