"""How near a training comes to the end of its device's memory."""

from flatout.records.machine import Machine
from flatout.records.profile import Profile

TIGHT_SHARE = 0.85
"""Share of the device from which on memory techniques are tried. The default allocator leaves up to
15 % of what it reserved unused (14.8 % for GPT-2 in bf16, 16.0 % for a ResNet-50, simulated): above
this, the next longer batch may not fit though it would by its tensors."""
STATES = {"SGD": 1, "Adafactor": 0, "SparseAdam": 2}
"""Copies of the parameters in the state of an optimizer; SGD's is its momentum. Adam and its
relatives keep two."""
PROCESS_BYTES = 390 * 10**6
"""What a process holds that has imported torch and made one step of an optimizer, which imports
torch's compiler (2.13 for CPUs, measured: 10 the interpreter, 223 torch, 159 the optimizer): the
peak of a training on a CPU is that of its process."""


HEAP_BYTES = 32 * 2**20
"""Blocks below this size glibc may keep in its heap when they are freed; larger ones it maps by
themselves and gives back (mallopt(3): M_MMAP_THRESHOLD moves up to here)."""


def room_bytes(profile: Profile, machine: Machine) -> int:
    """Return the memory of the device that trained."""
    if profile.device_kind == "cpu":
        return machine.memory_bytes
    return machine.device.memory_bytes


def peak_bytes(profile: Profile) -> int:
    """Return the most memory that was held; on the CPU the peak resident size."""
    peak = profile.peak_bytes
    return max(peak.allocated, peak.reserved, peak.device)


def is_tight(profile: Profile, machine: Machine) -> bool:
    """Return whether memory limits the batch: nearly all is used, or the allocator had to flush."""
    if profile.memory is not None and profile.memory.allocation_retries:
        return True
    room = room_bytes(profile, machine)
    return room > 0 and peak_bytes(profile) >= TIGHT_SHARE * room


def parameter_bytes(profile: Profile) -> int:
    """Return the bytes of all trained parameters."""
    return sum(model.parameter_bytes for model in profile.models)


def state_bytes(profile: Profile) -> int:
    """Estimate the bytes of the optimizers' state."""
    kept = max((STATES.get(o.name, 2) for o in profile.optimizers), default=0)
    return kept * parameter_bytes(profile)


def kept_bytes(profile: Profile, block_bytes: int, shrunk_bytes: int) -> int:
    """Return what the host's allocator keeps once blocks are small enough for its heap.

    Tables of 41 MB in halves: the process of a small language model grew by 63 MB where its tensors
    shrank by 9, and not at all with glibc told to map blocks of that size (measured).

    Args:
        profile: Of the training; on a device of its own the blocks lie elsewhere.
        block_bytes: Of a block now, given back each time.
        shrunk_bytes: Of each that takes its place; together they are as large.
    """
    is_kept = shrunk_bytes < HEAP_BYTES <= block_bytes
    return block_bytes if profile.device_kind == "cpu" and is_kept else 0


def activation_bytes(profile: Profile) -> int:
    """Estimate what the step itself holds: the peak without parameters, gradients and state."""
    fixed = 2 * parameter_bytes(profile) + state_bytes(profile)
    peak = profile.peak_bytes
    if not peak.allocated and profile.device_kind == "cpu":
        fixed += PROCESS_BYTES
    return max(0, (peak.allocated or peak.device) - fixed)
