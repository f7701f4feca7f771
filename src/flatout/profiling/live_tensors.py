"""Tensors that are alive now, by the address of their storage."""

import gc
from collections.abc import Iterator
from typing import Any

import torch

from flatout.profiling.allocations import EARLIER, OWN, Block, Look, Place
from flatout.seams.session import Session

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes whose storage is their own; subclasses may wrap others, which are found by themselves."""


def find_live(session: Session, device: str) -> dict[int, Block]:
    """Return what torch's allocator gave to the tensors that Python can reach.

    Memory from elsewhere (numpy, shared memory, mapped files) is left out: a storage on it cannot
    be resized.
    """
    kinds = dict(_kinds(session))
    found: dict[int, Block] = {}
    for tensor in _tensors():
        if tensor.device.type != device or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or not storage.resizable():
            continue
        kind, module = kinds.get(address, ("", ""))
        known = found.get(address)
        # Of all views of a storage the largest tells most.
        if known is None or (known.look and tensor.numel() > _numel(known.look)):
            look = Look(tuple(tensor.shape), str(tensor.dtype), kind, module)
            found[address] = Block(size, Place(EARLIER), 0, look)
    return found


def look_of(tensor: Any, device: str) -> tuple[int, Look] | None:
    """Return address and look of an ordinary tensor on the device."""
    if type(tensor) not in PLAIN or tensor.device.type != device:
        return None
    if tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage().data_ptr(), Look(tuple(tensor.shape), str(tensor.dtype))


def _numel(look: Look) -> int:
    count = 1
    for size in look.shape:
        count *= size
    return count


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        # Not isinstance: lazy proxies answer that by running code.
        if type(thing) in PLAIN:
            yield thing
            gradient: Any = thing.grad if thing.is_leaf else None
            if type(gradient) in PLAIN:
                yield gradient


def _kinds(session: Session) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield what is known by name: the later ones of an address win."""
    for segment in session.segments:
        yield from ((_address(loss), (OWN, "")) for loss in segment.losses)
    for optimizer in session.optimizers:
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, dict) else ()
            yield from ((_address(value), ("optimizer state", "")) for value in values)
    for module, name in module_names(session).items():
        for buffer in module.buffers(recurse=False):
            yield _address(buffer), ("buffer", name)
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                yield _address(parameter.grad), ("gradient", name)
            yield _address(parameter), ("parameter", name)


def module_names(session: Session) -> dict[torch.nn.Module, str]:
    """Return every module of the roots with its dotted name; of several roots with their class."""
    named: dict[torch.nn.Module, str] = {}
    for root in session.roots:
        kind = type(root).__name__
        for name, module in root.named_modules():
            name = name.replace("_orig_mod.", "").removesuffix("_orig_mod")
            full = f"{kind}.{name}" if name and len(session.roots) > 1 else name or kind
            named.setdefault(module, full)
    return named


def _address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() if type(tensor) in PLAIN else 0
