"""Run a call without keeping its activations: backward runs it again, bit for bit the same."""

import contextlib
import functools
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from flatout.agent.untouched import (
    PLAIN,
    Attributes,
    KeptBuffer,
    attributes_of,
    buffers_kept,
    buffers_of,
    changed_attributes,
    host_streams,
    put_attributes_back,
    state_kept,
    streams_kept,
)

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

    Random streams and autocast are as they were in the second run, and so are buffers, and numbers
    that a module keeps: a spectral norm, a codebook or a count of calls computes with what the call
    itself moves on. After it they are put back: batch statistics do not move twice.
    """
    before, drawn_from, second = buffers_of(module), _host_states(), _SecondRun(module)
    attributes = attributes_of(module)
    contexts = functools.partial(_contexts, second, is_selective=is_selective)
    names, count = tuple(kwargs), len(args)

    def run(_signs: Any, *given: Any) -> Any:
        return call(*given[:count], **dict(zip(names, given[count:], strict=True)))

    # Torch puts back the random streams of those devices only that it sees tensors of, and it looks
    # at what is given by position alone.
    given = (_signs(module), *args, *kwargs.values())
    output = checkpoint(run, *given, use_reentrant=False, context_fn=contexts)
    second.start = _moved(module, before)
    second.attributes = [
        # What is larger is left: a tensor of the last step would be kept until backward.
        (own, {k: x if isinstance(x, PLAIN) else own.get(k, x) for k, x in known.items()}, {})
        for own, known, _ in changed_attributes(attributes)
    ]
    # Torch sees to its own streams.
    has_drawn = pickle.dumps(_host_states()) != pickle.dumps(drawn_from)
    second.streams = drawn_from if has_drawn else {}
    return output


def _signs(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return an empty tensor on each device that a module computes on: its inputs may come later.

    Not the parameters themselves: nothing is said against changing those before backward.
    """
    found = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return [torch.empty(0, device=device) for device in sorted(found, key=str)]


def _contexts(
    second: "_SecondRun", *, is_selective: bool
) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    if not is_selective:
        return contextlib.nullcontext(), second
    forward, second.inner = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return forward, second


class _SecondRun:
    """What a second run is made in, and one more for each further backward through the graph."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.inner: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self.start: list[KeptBuffer] = []
        """The buffers that the first run moved, as it found them."""
        self.attributes: Attributes = []
        """What modules kept that the first run changed, numbers as it found them."""
        self.streams: dict[str, Any] = {}
        """Python's and numpy's random streams as it found them, where it drew from any."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(buffers_kept(self.module))
            for kept in self.start:
                kept.put_back()
            if self.attributes:
                stack.callback(put_attributes_back, attributes_of(self.module))
                put_attributes_back(self.attributes)
            if self.streams:
                stack.enter_context(streams_kept())
                for name, (_, put) in host_streams().items():
                    if name in self.streams:
                        put(self.streams[name])
            if not _is_written(getattr(self.inner, "storage", {})):
                stack.enter_context(self.inner)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _is_written(storage: dict[Any, Any]) -> bool:
    """Return whether a result that selective checkpointing kept was changed in place since.

    As by a ReLU in place after a convolution. Torch would end the step; all of it is run again.
    """
    entries = [
        entry
        for kept in storage.values()
        for entry in (kept.values() if isinstance(kept, dict) else kept)
    ]
    leaves = [leaf for leaf in tree_leaves(entries) if getattr(leaf, "version", None) is not None]
    return any(leaf.val._version != leaf.version for leaf in leaves)


def _host_states() -> dict[str, Any]:
    return {name: read() for name, (read, _) in host_streams().items()}


_MOVING: "weakref.WeakKeyDictionary[torch.nn.Module, frozenset[tuple[int, str]]]" = (
    weakref.WeakKeyDictionary()
)
"""By module the buffers that its first call moved, by owner and name: to compare waits for a GPU.
"""


def _moved(module: torch.nn.Module, before: Sequence[KeptBuffer]) -> list[KeptBuffer]:
    """Return the buffers that a call moved; of large tables that rest no copy is held."""
    if module not in _MOVING:
        changed = frozenset((id(kept.owner), kept.name) for kept in before if _differs(kept))
        _MOVING[module] = changed
    moving = _MOVING[module]
    return [
        kept
        for kept in before
        # What is written past torch's count of changes was seen in the first call.
        if (id(kept.owner), kept.name) in moving or kept.is_replaced or kept.is_written
    ]


def _differs(kept: KeptBuffer) -> bool:
    if isinstance(kept.buffer, FakeTensor) or kept.buffer.is_meta:
        return False
    return not torch.equal(kept.buffer, kept.value)


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
    call: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int]:
    """Return the bytes that a call keeps for backward and the FLOPs of running it again.

    It runs once and is thrown away: the module and the random streams are as before.
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
    with state_kept(module), counter:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = call(*args, **kwargs)
        del output
    return sum(sizes.values()), counter.get_total_flops()


def writes_into(
    call: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether a call changes tensors that it is given: a second run would be given others.

    It runs once on copies and is thrown away: the module and the random streams are as before.
    """
    args, kwargs = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (args, kwargs))
    with torch.no_grad(), state_kept(module):
        call(*args, **kwargs)
    leaves = tree_leaves((args, kwargs))
    return any(leaf._version > 0 for leaf in leaves if isinstance(leaf, torch.Tensor))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
