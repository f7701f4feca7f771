"""What a training process ran on, asked in the process itself when it ends."""

from typing import Any

from flatout.seams.session import Session
from flatout.seams.training_device import find_cuda_device


def device_facts(session: Session) -> dict[str, Any]:
    """Return what the training's device holds; on the CPU the peak resident size.

    A device that answers no more is noted: after an illegal access every call fails, and the result
    that says so must be written all the same.
    """
    import resource

    import torch

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = find_cuda_device(session)
    if device is None:
        return {"kind": "cpu", "peak": {"allocated": 0, "reserved": 0, "device": held}}
    facts: dict[str, Any] = {
        "kind": "cuda",
        "peak": {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
            "device": 0,
        },
    }
    try:
        facts["name"] = torch.cuda.get_device_name(device)
        facts["uuid"] = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        free, total = torch.cuda.mem_get_info(device)
        facts["peak"]["device"] = total - free
    except RuntimeError as error:
        session.note_error(f"device: {error}")
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
