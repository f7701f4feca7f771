"""Remember what shapes an operator gives: torch's own fake tensors spend most of a trace on that.

Torch caches these answers too, behind a key that takes longer than the answer. Here only plain
cases are remembered: results that are fresh, views of one argument, or an argument itself. Whatever
else comes back is computed by torch every time.

Without it a plan of a 7B model with LoRA takes 1.4 to 1.8 times the CPU time, a trace of ResNet-50
1.3, of a small GPT 1.1 (torch 2.13, 2 busy cores); a whole plan of a small model shows nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

MISSING = object()
"""Says that an answer is not known."""
PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}
    | {torch.memory_format}
)
"""Types of arguments that are told apart by their values."""
SEQUENCES = (list, tuple, torch.Size)
Key = tuple[Any, ...]
Answer = Callable[[FakeTensorMode, Sequence[Any]], Any]
"""Gives the results of a call again, from its arguments."""


class TensorLayout(NamedTuple):
    """Where the elements of a tensor lie."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int


class Made(NamedTuple):
    """A result, in a storage of its own or in that of an argument."""

    layout: TensorLayout
    of: int | None
    """Place of the argument that it is a view of."""

    def again(self, fake: FakeTensorMode, args: Sequence[Any]) -> FakeTensor:
        """Return such a result."""
        shape, stride, dtype, device, offset = self.layout
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if self.of is not None:
            empty.set_(args[self.of].untyped_storage(), offset, shape, stride)
        return FakeTensor(fake, empty, device)


class ShapeCache:
    """Answers for one fake mode, by operator and by the layouts of the arguments."""

    known: ClassVar[dict[Key, Answer | None]] = {}
    """Of all traces of this process, as torch's own cache is: they differ in little."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self.fake = fake

    def key(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Key | None:
        """Return what the answer depends on; None where that is more than layouts and numbers."""
        found: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not _add(args, found):
            return None
        for name, value in kwargs.items():
            found.append(name)
            if type(value) is FakeTensor or not _add((value,), found):
                return None
        # Without a tensor the device is another's business.
        return tuple(found) if TensorLayout in map(type, found) else None

    def find(self, key: Key, args: Sequence[Any]) -> Any:
        """Return the results again, `MISSING` where they are not known."""
        answer = self.known.get(key)
        return MISSING if answer is None else answer(self.fake, args)

    def keep(self, key: Key, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Remember the results; once they turn out not to be plain they stay unknown."""
        if key not in self.known:
            is_same = self.key(key[0], args, kwargs) == key
            self.known[key] = _answer(key[0], args, output) if is_same else None


def _add(values: Any, found: list[Any]) -> bool:
    """Append what tells the arguments apart; return whether that is all there is to them."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            layout = _layout(value)
            if layout is None:
                return False
            found.append(layout)
        elif kind in PLAIN:
            found += (kind, value)  # the kind too: 1, 1.0 and True are equal
        elif kind in SEQUENCES:
            found.append(len(value))
            if not _add(value, found):
                return False
        else:
            return False
    return True


def _layout(tensor: FakeTensor) -> TensorLayout | None:
    """Return where a tensor's elements lie; None where there is more to it."""
    if tensor.constant is not None or tensor.layout is not torch.strided:
        return None
    if tensor.is_complex() or tensor.is_neg():
        return None
    shape, offset = tensor.shape, int(tensor.storage_offset())
    return TensorLayout(shape, tensor.stride(), tensor.dtype, tensor.fake_device, offset)


def _answer(func: Any, args: Sequence[Any], output: Any) -> Answer | None:
    """Return what is remembered of a call that left its arguments as they lay; None for nothing."""
    if torch.Tag.inplace_view in func.tags or not torch._library.utils.is_builtin(func):
        return None
    given = [n for n, each in enumerate(args) if output is each and isinstance(each, FakeTensor)]
    if given or output is None:
        return lambda _, args: args[given[0]] if given else None
    if func._schema.is_mutable:
        return None
    if isinstance(output, tuple | list):
        return _several(func, args, output)
    made = _made(func, args, output)
    return None if made is None else made.again


def _several(func: Any, args: Sequence[Any], output: Sequence[Any]) -> Answer | None:
    """Return how to make several results again; None where one of them is not plain."""
    rows = [None if row is None else _made(func, args, row) for row in output]
    if sum(row is None for row in rows) > sum(row is None for row in output):
        return None
    fresh = [o for row, o in zip(rows, output, strict=True) if row is not None and row.of is None]
    if len({_storage(each) for each in fresh}) < len(fresh):
        return None
    kind = list if isinstance(output, list) else tuple
    return lambda fake, args: kind(None if row is None else row.again(fake, args) for row in rows)


def _made(func: Any, args: Sequence[Any], output: Any) -> Made | None:
    """Return how to make one result again; None where it is not plain."""
    layout = _layout(output) if type(output) is FakeTensor else None
    if layout is None or output.requires_grad:
        return None
    shared = [
        place
        for place, value in enumerate(args)
        if isinstance(value, Tensor) and _storage(value) == _storage(output)
    ]
    if shared:
        return Made(layout, shared[0])
    size = output.untyped_storage().nbytes()
    is_whole = layout.offset == 0 and size == _span(layout) * output.element_size()
    is_apart = not any(_storage(each) == _storage(output) for each in _nested(args))
    return Made(layout, None) if is_whole and is_apart and not func.is_view else None


def _nested(args: Sequence[Any]) -> list[Tensor]:
    lists = [each for each in args if isinstance(each, list | tuple)]
    return [each for values in lists for each in values if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def _span(layout: TensorLayout) -> int:
    """Return how many elements lie between a tensor's first and its last, both counted."""
    if 0 in layout.shape:
        return 0
    return 1 + sum((d - 1) * s for d, s in zip(layout.shape, layout.stride, strict=True))
