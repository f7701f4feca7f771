"""Which device a training runs on: the one that holds its parameters.

The process's current device need not be it. A training on the CPU may see a GPU, and a script that
names `cuda:1` in each call never makes that one current; asking the current one then tells of
another GPU, and puts a context on it.
"""

import weakref
from typing import TYPE_CHECKING

from flatout.agent.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_followed: list["weakref.ref[Session]"] = []
"""The session of this process, for techniques: they see loaders and models, but no session."""


def follow(session: Session) -> None:
    """Let `batch_device` know the models and optimizers of this session."""
    _followed[:] = [weakref.ref(session)]


def live_optimizers() -> "list[torch.optim.Optimizer]":
    """Return the live optimizers of this process, for techniques that watch the first step."""
    session = _followed[0]() if _followed else None
    return session.optimizers if session is not None else []


def find_cuda_device(session: Session) -> "torch.device | None":
    """Return the CUDA device of the training, of several the first; None where it is on the CPU."""
    return next(iter(find_cuda_devices(session)), None)


def find_cuda_devices(session: Session) -> "list[torch.device]":
    """Return the CUDA devices that hold parameters of the training; none where it is on the CPU.

    The process's current device is in while no parameter is known, and where all parameters lie
    on the CPU between the steps although something was allocated on the device.
    """
    import torch

    # Not `is_available`: it wakes the driver, and processes forked later could not use the device.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    found = list(dict.fromkeys(_devices(session)))
    on_device = [device for device in found if device.type == "cuda"]
    if on_device:
        return on_device
    current = torch.device("cuda", torch.cuda.current_device())
    if found and not torch.cuda.max_memory_allocated(current):
        return []  # the script only asked the device something
    return [current]


def batch_device() -> "torch.device":
    """Return the device on which batches are used, for techniques on loaders.

    The optimizer is mostly built before the first batch is drawn, so ask when an epoch begins: when
    a loader is made, the model may not be there, or not be where it will train. Before any
    parameter is known it is the process's current device.
    """
    import torch

    session = _followed[0]() if _followed else None
    # Its first parameter's: a model takes its batch there, also where later layers are elsewhere.
    found = next(_devices(session), None) if session is not None else None
    if found is not None:
        return found
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _devices(session: Session) -> "Iterator[torch.device]":
    """Yield the parameters' devices: the roots' first, then the optimizers'.

    A parameter on the meta device has no place yet.
    """
    groups = (g for optimizer in session.optimizers for g in optimizer.param_groups)
    for parameters in (
        *(root.parameters() for root in session.roots),
        *(group["params"] for group in groups),
    ):
        yield from (p.device for p in parameters if p.device.type != "meta")
