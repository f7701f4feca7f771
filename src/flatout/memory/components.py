"""What each traced allocation is for, and the finished stream."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flatout.memory.recording import Birth, Recording
from flatout.memory.stream import Allocation, Component, Phase, StreamEvent


def know_model(recording: Recording, model: nn.Module) -> dict[int, str]:
    """Say what the model's tensors are for; return the names of its modules by identity."""
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), plain_name(name) or type(module).__name__)
        own = names[id(module)] if name else ""
        for buffer in module.buffers(recurse=False):
            recording.know(buffer, Component.BUFFERS, own)
        for parameter in module.parameters(recurse=False):
            recording.know(parameter, Component.PARAMETERS, own)
    return names


def plain_name(name: str) -> str:
    """Return a module's name without the wrapping of compilers and checkpoints.

    >>> plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.mlp")
    'layers.0.mlp'
    """
    parts = name.split(".")
    return ".".join(p for p in parts if p not in ("_orig_mod", "_checkpoint_wrapped_module"))


def know_gradients(recording: Recording, parameters: Iterable[Any]) -> None:
    """Say which allocations are gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            owner = recording.find_local(parameter)
            recording.know(parameter.grad, Component.GRADIENTS, owner.module if owner else "")


def know_state(recording: Recording, optimizer: Optimizer) -> None:
    """Say which allocations an optimizer keeps."""
    for parameter, state in optimizer.state.items():
        owner = recording.find_local(parameter)
        for value in state.values() if isinstance(state, dict) else ():
            if hasattr(value, "untyped_storage"):
                recording.know(value, Component.OPTIMIZER, owner.module if owner else "")


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def allocations_of(recording: Recording) -> tuple[Allocation, ...]:
    """Return the traced allocations, each with what it is for."""
    backwards = [mark.at for mark in recording.marks if mark.phase is Phase.BACKWARD]
    return tuple(
        Allocation(
            size=birth.size,
            component=birth.component or _by_life(birth, backwards),
            phase=birth.phase,
            step=birth.step,
            operator=str(birth.operator),
            module=birth.module,
            line=birth.line,
            shape=birth.shape,
            dtype=birth.dtype,
        )
        for birth in recording.births
    )


def ordered(events: Sequence[StreamEvent]) -> tuple[StreamEvent, ...]:
    """Return the events with deaths that follow each other in the order of their births.

    Together they say the same, and two traces then say it alike: what dies with a dictionary of
    C++'s dies in the order of its pointers.
    """
    found: list[StreamEvent] = []
    for is_birth, run in itertools.groupby(events, key=lambda event: event.born):
        part = list(run)
        found += part if is_birth else sorted(part, key=lambda event: event[0])
    return tuple(found)


def _by_life(birth: Birth, backwards: Sequence[int]) -> Component:
    """Tell what an allocation is for by when it lived."""
    if birth.phase is Phase.DATA:
        return Component.INPUTS
    if birth.phase is Phase.SETUP:
        return Component.BUFFERS if birth.died is None else Component.TEMPORARIES
    if birth.phase is not Phase.FORWARD:
        return Component.TEMPORARIES
    after = bisect_left(backwards, birth.born)
    begins = backwards[after] if after < len(backwards) else None
    if begins is None:
        return Component.TEMPORARIES
    is_kept = birth.died is None or birth.died >= begins
    return Component.ACTIVATIONS if is_kept else Component.TEMPORARIES
