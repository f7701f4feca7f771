"""Images of bytes in torch that are followed rather than computed with, and stacked as bytes."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flatout.data.byte_batches.levels import (
    MIN_BYTES,
    Followed,
    Grid,
    LentGrid,
    Pixels,
    UnfollowableError,
    column,
    follow,
    planes,
    refuse_shared,
)
from flatout.data.byte_batches.packed import shared_bytes


def computed(pixels: Pixels) -> torch.Tensor:
    """Return the tensor that the pixels stand for."""
    values = np.ascontiguousarray(pixels.view) if pixels.is_ordered else pixels.view
    values = values.copy("K") if any(stride < 0 for stride in values.strides) else values
    with torch._C.DisableTorchFunction():
        source = torch.from_numpy(values if values.flags.writeable else values.copy("K"))
        levels = pixels.grid.levels
        made = torch.empty_like(source, dtype=levels.dtype)
        pairs = zip(planes(made, pixels.axis), planes(source, pixels.axis), strict=True)
        for channel, (target, plane) in enumerate(pairs):
            target.copy_(levels[channel if len(levels) > 1 else 0][plane.long()])
    return made


def stacked(images: Sequence[Pixels]) -> Pixels | None:
    """Return the batch, in shared memory where this is a worker; None where they differ."""
    first = images[0]
    axes = {image.axis for image in images if image.axis is not None}
    if len(axes) > 1 or not all(means_the_same(first, image) for image in images[1:]):
        return None
    axis = axes.pop() + 1 if axes else None
    grid = Grid(first.grid.levels, first.grid.steps)
    store = shared_bytes((len(images), *first.view.shape))
    values = store.numpy()
    for place, image in zip(values, images, strict=True):
        place[...] = image.view
    return Pixels(values, grid, axis, store=store)


def means_the_same(one: Pixels, other: Pixels) -> bool:
    """Return whether two images of the same shape had the same done to them."""
    ours, theirs = one.grid.levels, other.grid.levels
    if one.view.shape != other.view.shape:
        return False
    # Of an image whose channels are treated alike, the axis need not be known.
    is_open = None in (one.axis, other.axis) and len(ours) == len(theirs) == 1
    if one.axis != other.axis and not is_open:
        return False
    with torch._C.DisableTorchFunction():
        return ours.dtype == theirs.dtype and (ours is theirs or _bits(ours) == _bits(theirs))


def _bits(levels: torch.Tensor) -> bytes:
    return bytes(levels.contiguous().view(torch.uint8).numpy().data)


ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}
"""Torch's name and numpy's."""
KNOWN_TYPES = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
"""Types in which numpy could do the same."""


class LazyTensor(Followed, torch.Tensor):
    """Stands for the tensor that arithmetic on an image of bytes would have given.

    It has no memory: code that reaches for it fails or has it computed, and never sees the bytes.
    """

    @staticmethod
    def __new__(cls, pixels: Pixels) -> "LazyTensor":
        """Return a tensor of that shape and type without memory."""
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(pixels.view.shape), dtype=pixels.grid.levels.dtype
        )
        made._pixels, made.made = pixels, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self._pixels.view.shape)})"

    def as_subclass(self, kind: Any) -> Any:
        """Stay as it is for torchvision's names for tensors: a batch of them is a plain tensor.

        Torch lets no one but the class itself have a say in this.
        """
        if kind.__module__.startswith("torchvision."):
            return self
        return self.settle().as_subclass(kind)

    def read(self) -> Tensor:
        """Return the tensor for a use that neither writes into it nor hands out its memory."""
        return computed(self._pixels) if self.made is None else self.made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _settled(args), _settled(kwargs or {})
        handler = HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], LazyTensor | list | tuple):
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        plain = LazyTensor.read if func in READING else LazyTensor.settle
        return func(*_exchanged(args, plain), **_exchanged(kwargs, plain))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Torch declares this as a method of an instance and calls it on the class.
        plain = LazyTensor.settle
        return func(*_exchanged(args, plain), **_exchanged(kwargs or {}, plain))


class FollowTensors(TorchFunctionMode):
    """Follow every tensor of bytes from the moment it turns into floating point."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in STARTERS and args and _is_image(args[0]):
            lazy = LazyTensor(_begin(args[0]))
            result = HANDLERS[func](lazy, *args[1:], **kwargs)
            if result is not NotImplemented and result.is_floating_point():
                return result
        return func(*args, **kwargs)


def _is_image(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, LazyTensor):
        return False
    with torch._C.DisableTorchFunction():
        return (
            value.dtype == torch.uint8
            and value.dim() >= 2
            and value.numel() >= MIN_BYTES
            and value.device.type == "cpu"
            and value.layout == torch.strided
        )


def _begin(value: torch.Tensor) -> Pixels:
    with torch._C.DisableTorchFunction():
        # A copy, in the same order of axes: the data set may fill its buffer again.
        pixels = follow(value.detach().clone().numpy())
    pixels.grid.levels = torch.from_numpy(pixels.grid.levels)
    return pixels


def from_array(pixels: Pixels) -> LazyTensor:
    """Return what `torch.from_numpy` would give, still to be computed."""
    grid = LentGrid(torch.from_numpy(pixels.grid.levels), pixels.grid)
    return LazyTensor(pixels.derived(grid, pixels.axis))


def _settled(value: Any) -> Any:
    """Return tensors that were computed for good in place of what stood for them."""
    return _exchanged(value, lambda lazy: lazy if lazy.made is None else lazy.made)


def _exchanged(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with followed tensors, also in lists and the like, exchanged for others."""
    if isinstance(value, LazyTensor):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [_exchanged(item, change) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _exchanged(item, change) for key, item in value.items()}
    return value


def _arithmetic(name: str, *, is_turned: bool = False) -> Callable[..., Any]:
    operate = getattr(torch, name)

    def apply(subject: Any, constant: Any, **options: Any) -> Any:
        if not isinstance(subject, LazyTensor):
            return NotImplemented  # `torch.sub(1, lazy)`: computed
        pixels = subject.pixels
        is_number = isinstance(constant, int | float)
        is_plain = isinstance(constant, torch.Tensor) and not isinstance(constant, LazyTensor)
        if options or not (is_number or is_plain):
            return NotImplemented
        found = column(constant, pixels)
        if found is None:
            return NotImplemented
        value, axis = found
        with torch._C.DisableTorchFunction():
            levels = pixels.grid.levels
            made = operate(value, levels) if is_turned else operate(levels, value)
        step = (ARITHMETIC[name], _constant(value, made.dtype), is_turned)
        return LazyTensor(pixels.derived(Grid(made, _more(pixels.grid, step)), axis))

    return apply


def _in_place(name: str) -> Callable[..., Any]:
    apply = _arithmetic(name)

    def change(subject: LazyTensor, constant: Any, **options: Any) -> Any:
        before = subject.pixels
        refuse_shared(before, "is changed in place")
        made = apply(subject, constant, **options)
        if made is NotImplemented or made.pixels.grid.levels.dtype != before.grid.levels.dtype:
            raise UnfollowableError(f"torch's {name} in place could not be followed")
        subject.pixels = made.pixels
        return subject

    return change


def _more(grid: Grid, step: Any) -> Any:
    return None if grid.steps is None or step[1] is None else (*grid.steps, step)


def _constant(value: Any, dtype: torch.dtype) -> Any:
    """Return a constant as numpy would need it to do what torch does; None where it cannot."""
    if dtype not in KNOWN_TYPES:
        return None
    with torch._C.DisableTorchFunction():
        if isinstance(value, torch.Tensor):
            return value.detach().to(dtype).cpu().numpy()
    return KNOWN_TYPES[dtype](value)


def _convert(subject: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    pixels = subject.pixels
    if dtype == pixels.grid.levels.dtype:
        return subject  # as torch does, which copies nothing then
    with torch._C.DisableTorchFunction():
        made = pixels.grid.levels.to(dtype)
    known = KNOWN_TYPES.get(dtype)
    step = ("astype", None if known is None else np.dtype(known), False)
    return LazyTensor(pixels.derived(Grid(made, _more(pixels.grid, step)), pixels.axis))


def _to(subject: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = kwargs.pop("dtype", None) or (args[0] if len(args) == 1 else None)
    kwargs.pop("non_blocking", None)
    if kwargs or not isinstance(wanted, torch.dtype) or len(args) > 1:
        return NotImplemented
    return subject if wanted == subject.dtype else _convert(subject, wanted)


def _permute(subject: LazyTensor, *order: Any, **kwargs: Any) -> Any:
    order = kwargs.pop("dims", order)
    if len(order) == 1 and not isinstance(order[0], int):
        order = tuple(order[0])
    return LazyTensor(subject.pixels.transposed(order))


def _transpose(subject: LazyTensor, first: int, second: int) -> Any:
    order = list(range(subject.pixels.view.ndim))
    order[first], order[second] = order[second], order[first]
    return LazyTensor(subject.pixels.transposed(order))


def _contiguous(subject: LazyTensor, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    is_so = subject.pixels.view.flags.c_contiguous or subject.pixels.is_ordered
    return subject if is_so else LazyTensor(subject.pixels.ordered().copied())


def _clone(subject: LazyTensor, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else LazyTensor(subject.pixels.copied())


def _flip(subject: LazyTensor, *dims: Any, **kwargs: Any) -> Any:
    dims = kwargs.pop("dims", dims)
    places = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    pixels = subject.pixels
    places = {place % pixels.view.ndim for place in places}
    if pixels.axis in places:
        return NotImplemented
    key = tuple(slice(None, None, -1 if i in places else None) for i in range(pixels.view.ndim))
    # Torch flips into new memory: numpy's view of negative strides would not do outside.
    flipped = pixels.laid_out(pixels.view[key].copy("K"), pixels.axis)
    return LazyTensor(flipped.copied())


def _part(subject: LazyTensor, key: Any) -> Any:
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(item, slice) and (item.step or 1) < 1 for item in keys):
        return NotImplemented  # torch refuses these, in its own words
    part = subject.pixels.part(key)
    return NotImplemented if part is None else LazyTensor(part)


def _view(subject: LazyTensor, *sides: Any) -> Any:
    shape = tuple(sides[0]) if len(sides) == 1 and not isinstance(sides[0], int) else sides
    is_same = shape == tuple(subject.pixels.view.shape)
    return subject if is_same and subject.pixels.view.flags.c_contiguous else NotImplemented


def _without_gradient(subject: LazyTensor, requires_grad: bool = True) -> Any:  # noqa: FBT001, FBT002
    return NotImplemented if requires_grad else subject


def _unsqueeze(subject: LazyTensor, dim: int) -> Any:
    place = dim % (subject.pixels.view.ndim + 1)
    return LazyTensor(_known(subject.pixels.part((*[slice(None)] * place, None))))


def _known(pixels: Pixels | None) -> Pixels:
    assert pixels is not None, "whole axes are always a part"
    return pixels


def _stack(tensors: Any, dim: int = 0, *, out: Any = None) -> Any:
    """Stack followed images into one array of bytes, in shared memory where this is a worker."""
    if dim != 0 or out is not None or not all(type(item) is LazyTensor for item in tensors):
        return NotImplemented
    made = stacked([item.pixels for item in tensors])
    return NotImplemented if made is None else LazyTensor(made)


def _same(subject: LazyTensor, *_: Any, **__: Any) -> LazyTensor:
    return subject


def _named(*names: str) -> list[Any]:
    found = [getattr(owner, name, None) for name in names for owner in (Tensor, torch)]
    return [item for item in found if item is not None]


def _handlers() -> dict[Any, Callable[..., Any]]:
    made: dict[Any, Callable[..., Any]] = {}
    for name in ARITHMETIC:
        word = {"div": "truediv"}.get(name, name)
        made |= dict.fromkeys(_named(name, f"__{word}__"), _arithmetic(name))
        made |= dict.fromkeys(_named(f"{name}_", f"__i{word}__"), _in_place(name))
    for alias, name in {"true_divide": "div", "subtract": "sub", "multiply": "mul"}.items():
        made |= dict.fromkeys(_named(alias), _arithmetic(name))
        made |= dict.fromkeys(_named(f"{alias}_"), _in_place(name))
    made |= dict.fromkeys(_named("__radd__"), _arithmetic("add"))
    made |= dict.fromkeys(_named("__rmul__"), _arithmetic("mul"))
    made |= dict.fromkeys(_named("__rsub__"), _arithmetic("sub", is_turned=True))
    made |= dict.fromkeys(_named("__rtruediv__", "__rdiv__"), _arithmetic("div", is_turned=True))
    for kind, names in {
        torch.float32: ("float",),
        torch.float64: ("double",),
        torch.float16: ("half",),
        torch.bfloat16: ("bfloat16",),
    }.items():
        made |= dict.fromkeys(_named(*names), functools.partial(_convert, dtype=kind))
    layouts: dict[Callable[..., Any], tuple[str, ...]] = {
        _to: ("to", "type"),
        _permute: ("permute",),
        _transpose: ("transpose", "swapaxes"),
        _contiguous: ("contiguous",),
        _clone: ("clone",),
        _flip: ("flip",),
        _part: ("__getitem__",),
        _unsqueeze: ("unsqueeze",),
        _view: ("view", "reshape"),
        _without_gradient: ("requires_grad_",),
        _same: ("detach", "cpu"),
        _stack: ("stack",),
    }
    for function, words in layouts.items():
        made |= dict.fromkeys(_named(*words), function)
    return made


def _metadata() -> set[Any]:
    names = ["dtype", "shape", "device", "ndim", "layout", "is_cuda", "requires_grad", "is_sparse"]
    names += ["is_quantized", "is_nested", "grad", "grad_fn", "is_mps", "is_meta", "names"]
    getters = [inspect.getattr_static(Tensor, name, None) for name in names]
    calls = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "__len__")
    found = {getter.__get__ for getter in getters if getter is not None}
    return found | set(_named(*calls, "is_tensor", "element_size", "ndimension"))


HANDLERS = _handlers()
METADATA = _metadata()
READING = frozenset(
    _named("all", "allclose", "any", "equal", "isfinite", "isnan", "max", "mean", "min", "std")
    + _named("sum", "var", "tolist")
)
"""Operations whose results are new memory and that write nothing: what scripts log and check."""
STARTERS = frozenset(
    _named("float", "double", "half", "bfloat16", "to", "type", "div", "__truediv__", "mul")
    + _named("__mul__", "true_divide", "sub", "__sub__")
)
"""Operations that may turn bytes into floating point."""
