"""What torch's own Python has to do otherwise while the tensors are fake, with or without a GPU."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._utils import _rebuild_meta_tensor_no_storage
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils as foreach
from torch.utils._python_dispatch import _disable_current_modes

from flatout.agent.patching import swapped
from flatout.planner.tracing.recording import labelled

Moved = Callable[[dict[int, nn.Parameter]], None]
"""Told of the parameters that a module's `to`, `cuda`, `bfloat16` replaced, by identity."""


@contextlib.contextmanager
def fake_rules(
    moved: Moved, resized: Callable[[Any], None], made: Callable[[torch.Tensor, str], None]
) -> Iterator[None]:
    """Let modules, optimizers and scalers take fake tensors for ordinary ones while this runs.

    Args:
        moved: told of parameters that were replaced.
        resized: told of a storage right after it was resized in place, as FSDP does.
        made: told of a tensor of the host that no operator makes, and of what made it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_foreach_takes_fake())
        stack.enter_context(swapped(torch.Tensor, "as_subclass", labelled))
        stack.enter_context(swapped(nn.Module, "_apply", _apply_for(moved)))
        scaler = torch.amp.GradScaler
        if hasattr(scaler, "_maybe_opt_step"):
            stack.enter_context(swapped(scaler, "_maybe_opt_step", _step_always))
        stack.enter_context(swapped(torch.UntypedStorage, "resize_", _telling(resized)))
        stack.enter_context(swapped(FakeTensor, "numpy", _zeros_of))
        stack.enter_context(swapped(FakeTensor, "data", property(_data_of, _take_data)))
        stack.enter_context(swapped(FakeTensor, "__format__", _formatted))
        stack.enter_context(swapped(FakeTensor, "__reduce_ex__", _pickled))
        stack.enter_context(swapped(torch, "get_rng_state", _random_state(made)))
        stack.enter_context(swapped(DeviceMesh, "__init__", _really(DeviceMesh.__init__)))
        yield


@contextlib.contextmanager
def _foreach_takes_fake() -> Iterator[None]:
    """Let optimizers choose their many-tensors path as they do for ordinary tensors."""
    lists = [getattr(each, "_foreach_supported_types", []) for each in (optimizers, foreach)]
    grown = [each for each in {id(each): each for each in lists}.values() if FakeTensor not in each]
    for each in grown:
        each.append(FakeTensor)
    try:
        yield
    finally:
        for each in grown:
            each.remove(FakeTensor)


def _step_always(
    _: Any, optimizer: torch.optim.Optimizer, __: Any, *args: Any, **kwargs: Any
) -> Any:
    """Step: that a gradient is infinite cannot be seen, and is the exception."""
    return optimizer.step(*args, **kwargs)


def _data_of(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined]
    return found


def _take_data(tensor: Any, value: torch.Tensor) -> None:
    """Take over the shape of a tensor: `weight.data = torch.tensor(array)` brings a real one."""
    if not isinstance(value, FakeTensor):
        with _disable_current_modes():
            value = tensor.fake_mode.from_tensor(value)
    torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    tensor.fake_device = value.device


def _zeros_of(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Return zeros: what a script prints or logs is not what is asked here."""
    import numpy as np

    kind = np.float32 if tensor.dtype.is_floating_point else np.int64
    return np.zeros(tuple(tensor.shape), kind)


def _formatted(tensor: torch.Tensor, spec: str) -> str:
    """Format one number as such, which torch does for its own class only: `f"{loss:.3f}"`."""
    return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)


def _pickled(tensor: torch.Tensor, _: Any) -> Any:
    """Return how a checkpoint keeps a tensor without values: as one of `meta`."""
    layout = (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad)
    return _rebuild_meta_tensor_no_storage, layout


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function run on real tensors: a mesh reads the numbers of its ranks."""

    def ranks(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        return torch.arange(value.numel(), dtype=value.dtype).view(value.shape)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*map(ranks, args), **{k: ranks(v) for k, v in kwargs.items()})

    return run


def _random_state(made: Callable[[torch.Tensor, str], None]) -> Callable[[], torch.Tensor]:
    """Return `get_rng_state` that tells of its tensor: a checkpoint keeps one a block."""
    get_state = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = get_state()
        made(state, "get_rng_state")
        return state

    return get_rng_state


def _telling(resized: Callable[[Any], None]) -> Callable[..., Any]:
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize_(storage: Any, *args: Any) -> Any:
        result = resize(storage, *args)
        resized(storage)
        return result

    return resize_


def _apply_for(moved: Moved) -> Callable[..., nn.Module]:
    """Return a `Module._apply` that puts new parameters in, ties kept.

    Torch's own changes a parameter's inside in place, which fake tensors do not allow. The
    outermost module names all that were replaced. Those are held until then: no other tensor
    gets the identity of one.
    """
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    running: list[nn.Module] = []

    def apply(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002
        running.append(module)
        try:
            for child in module.children() if recurse else ():
                child._apply(fn)  # type: ignore[no-untyped-call]
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in replaced:
                    replaced[id(parameter)] = parameter, _changed(parameter, fn)
                module._parameters[name] = replaced[id(parameter)][1]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        finally:
            running.pop()
            if not running:
                moved({old: new for old, (_, new) in replaced.items()})
                replaced.clear()
        return module

    return apply


def _changed(parameter: nn.Parameter, fn: Callable[[Any], Any]) -> nn.Parameter:
    with torch.no_grad():
        value: torch.Tensor = fn(parameter)
    if value is parameter:
        return parameter
    new = nn.Parameter(value, parameter.requires_grad)
    if parameter.grad is not None:
        with torch.no_grad():
            new.grad = fn(parameter.grad)
    return new
