"""Run a call without keeping its activations: backward runs it again, bit for bit the same."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from flatout.agent.untouched import buffers_kept, streams_kept

KEPT_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "linear",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)
"""Operators whose results selective checkpointing keeps: nearly all of the work is in them, and
the cheap ones between them make most of the memory (Megatron's selective recomputation)."""


def recomputed(
    call: Callable[..., Any],
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_selective: bool = False,
) -> Any:
    """Run a call of a module and keep only its arguments, or with them its matrix products.

    Random streams and autocast are as they were in the second run, and buffers are put back after
    it: batch statistics do not move twice.
    """
    contexts = functools.partial(_contexts, module, is_selective=is_selective)
    names, count = tuple(kwargs), len(args)

    def run(_signs: Any, *given: Any) -> Any:
        return call(*given[:count], **dict(zip(names, given[count:], strict=True)))

    # Torch puts back the random streams of those devices only that it sees tensors of, and it looks
    # at what is given by position alone.
    given = (_signs(module), *args, *kwargs.values())
    return checkpoint(run, *given, use_reentrant=False, context_fn=contexts)


def _signs(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return an empty tensor on each device that a module computes on: its inputs may come later.

    Not the parameters themselves: nothing is said against changing those before backward.
    """
    return [torch.empty(0, device=device) for device in _devices(module)]


def _devices(module: torch.nn.Module) -> list[torch.device]:
    found = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return sorted(found, key=str)


def _contexts(
    module: torch.nn.Module, *, is_selective: bool
) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    if not is_selective:
        return contextlib.nullcontext(), buffers_kept(module)
    forward, again = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return forward, _both(buffers_kept(module), again)


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


def _policy(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    packet = getattr(operator, "overloadpacket", None)
    is_kept = packet in _kept_packets() and not _draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call takes numbers from a random stream.

    If its result were kept, the second run would not call it, and whatever draws after it there
    would draw other numbers.
    """
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", 0.0) > 0.0)


@functools.cache
def _kept_packets() -> frozenset[Any]:
    found = (getattr(torch.ops.aten, name, None) for name in KEPT_OPERATORS)
    return frozenset(packet for packet in found if packet is not None)


def saved_cost(
    call: Callable[..., Any],
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[int, int]:
    """Return the bytes that a call keeps for backward and the FLOPs of running it again.

    It runs once and is thrown away: random streams and buffers are as before.
    """
    from torch.utils.flop_counter import FlopCounterMode

    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    fixed = {_address(t) for t in (*tensors, *module.parameters(), *module.buffers())}
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if _address(tensor) not in fixed:
            sizes[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    counter = FlopCounterMode(display=False)
    with streams_kept(), buffers_kept(module), counter:
        with torch.autograd.graph.saved_tensors_hooks(note, _itself):
            output = call(*args, **kwargs)
        del output
    return sum(sizes.values()), counter.get_total_flops()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
