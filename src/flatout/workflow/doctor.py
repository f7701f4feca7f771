"""Look at everything around a training that decides whether it runs, where, and how fast."""

import os
import tempfile
import time
from pathlib import Path

from flatout.core.check import Check
from flatout.core.machine import Machine
from flatout.hardware.load import Load, load_meter, process_tree
from flatout.workflow.checks import devices, host, software

CHECKS = (
    devices.training_device,
    devices.driver_fits,
    devices.busy_gpus,
    software.versions,
    software.variables,
    host.cores,
    host.threads,
    host.memory,
    host.shared_memory,
    host.open_files,
    host.huge_pages,
    software.compiler,
    software.allocator,
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
    found.append(host.disk(folder or Path(tempfile.gettempdir())))
    found.append(host.quiet(_listen()))
    return tuple(check for check in found if check is not None)


def _listen() -> Load:
    meter = load_meter()
    own = process_tree(os.getpid())
    before = meter.read(own)
    time.sleep(LISTEN_S)
    return meter.between(before, meter.read(own))
