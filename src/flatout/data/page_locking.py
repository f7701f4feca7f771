"""Page-lock memory that another process made: a CUDA device copies from it while we go on."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

PORTABLE = 1
"""`cudaHostRegisterPortable`: locked for every device of the process."""
_TROUBLE: list[str] = []
"""Why nothing is locked any more: said once, and not tried again."""


def find_place(device: torch.device | None) -> int | None:
    """Return the number of a device through which to lock; None for not now.

    Locking makes a context where there is none, and whoever asks need not have made the training's
    device current: each rank would put one on the first GPU. Where CUDA was not woken yet nothing
    is done: what forks later could not use the device.

    Args:
        device: that will copy; None for any that is in use.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    if device is not None:
        return torch.cuda.current_device() if device.index is None else device.index
    return next(filter(_is_used, range(torch.cuda.device_count())), None)


def _is_used(number: int) -> bool:
    library: Any = torch._C  # its stubs leave this out without CUDA
    return bool(library._cuda_hasPrimaryContext(number))


def lock(memory: torch.Tensor, device: int) -> Callable[[], None] | None:
    """Lock a tensor's pages, and return what unlocks them; None where that cannot be done."""
    if _TROUBLE:
        return None
    owner = os.getpid()
    at, count = memory.data_ptr(), memory.numel()
    error = _asked(device, lambda runtime: runtime.cudaHostRegister(at, count, PORTABLE))
    if error:
        _TROUBLE.append(error)
        logging.getLogger(__name__).warning(
            "flatout: batches are copied once more, into page-locked memory, because memory that "
            "loader workers share cannot be locked (%s); `ulimit -l` may limit it",
            error,
        )
        return None

    def unlock() -> None:
        # A forked copy of the process has no part in the device's locks.
        if os.getpid() == owner:
            with torch.cuda.device(device):
                torch.cuda.cudart().cudaHostUnregister(at)  # type: ignore[no-untyped-call]

    return unlock


def _asked(device: int, ask: Callable[[Any], Any]) -> str:
    """Ask CUDA's runtime for something; return why it was refused, or nothing.

    In a thread of its own: the runtime keeps an error for the thread that got it, and torch would
    find it after its next kernel and take it for that one's.
    """
    found: list[str] = []

    def work() -> None:
        try:
            with torch.cuda.device(device):
                code = int(ask(torch.cuda.cudart()))  # type: ignore[no-untyped-call]
            found.append(f"CUDA error {code}" if code else "")
        except Exception as error:  # noqa: BLE001  whatever it is, memory stays as it was
            found.append(f"{type(error).__name__}: {error}")

    try:
        thread = threading.Thread(target=work, name="flatout-page-locking", daemon=True)
        thread.start()
        thread.join()
    except RuntimeError as error:  # no more threads are to be had
        return str(error)
    return found[0] if found else "its thread ended"
