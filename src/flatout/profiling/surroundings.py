"""What a training process ran on, asked in the process itself when it ends."""

from collections.abc import Callable
from typing import Any


def device_facts(note_error: Callable[[str], None]) -> dict[str, Any]:
    """Return what the device holds; on the CPU the peak resident size.

    Args:
        note_error: Told of a device that answers no more: after an illegal access every call fails,
            and the result that says so must be written all the same.
    """
    import resource

    import torch

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {"kind": "cpu", "peak": {"allocated": 0, "reserved": 0, "device": held}}
    facts: dict[str, Any] = {
        "kind": "cuda",
        "peak": {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "device": 0,
        },
    }
    try:
        facts["name"] = torch.cuda.get_device_name()
        facts["uuid"] = str(getattr(torch.cuda.get_device_properties(), "uuid", ""))
        free, total = torch.cuda.mem_get_info()
        facts["peak"]["device"] = total - free
    except RuntimeError as error:
        note_error(f"device: {error}")
    return facts


def environment_facts() -> dict[str, Any]:
    """Return the stack that ran, for the record."""
    import platform

    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }
