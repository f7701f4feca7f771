"""Images of bytes in numpy that are followed rather than computed with."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flatout.core.nested import map_leaves
from flatout.data.levels import Pixels, UnfollowableError, can_follow, column, follow, planes

FOLLOWED = ("add", "subtract", "multiply", "divide")
"""The arithmetic that is followed. Each is rounded correctly by every processor, so that 256 levels
and a whole image agree to the bit; functions such as `power` need not."""


class ByteArray(np.ndarray[Any, Any]):
    """A true array of bytes that begins to be followed once it turns into floating point."""

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Follow a conversion to floating point; any other is made."""
        if np.dtype(dtype).kind != "f" or not can_follow(self):
            return np.asarray(super().astype(dtype, *args, **kwargs))
        return converted(_begin(self), np.dtype(dtype))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs and can_follow(self):
            found = _operated(ufunc, inputs)
            if found is not None and found.dtype.kind == "f":
                return found
        return _plainly(ufunc, method, inputs, kwargs)


class LazyArray:
    """Stands for the array that arithmetic on an image of bytes would have given.

    Whatever it does not know is asked of that array, which is then computed.
    """

    __slots__ = ("pixels",)
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels

    @property
    def shape(self) -> tuple[int, ...]:
        """Sides of the array."""
        return tuple(self.pixels.view.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.pixels.view.ndim

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Type that the values would have."""
        kind: np.dtype[Any] = self.pixels.grid.levels.dtype
        return kind

    @property
    def T(self) -> "LazyArray":  # noqa: N802  numpy's name
        """The axes turned round."""
        return self.transpose()

    def transpose(self, *order: Any) -> "LazyArray":
        """Put the axes into another order."""
        if len(order) == 1 and not isinstance(order[0], int):
            order = tuple(order[0] or ())
        return LazyArray(self.pixels.transposed(order or range(self.ndim)[::-1]))

    def astype(self, dtype: Any, order: str = "K", **kwargs: Any) -> Any:
        """Convert the levels."""
        del kwargs
        kept = self.pixels if order == "K" else self.pixels.ordered()
        return converted(kept, np.dtype(dtype))

    def copy(self, order: str = "C") -> "LazyArray":
        """Return a copy."""
        return LazyArray((self.pixels if order == "K" else self.pixels.ordered()).copied())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        del copy
        made = computed(self.pixels)
        return made if dtype is None else made.astype(dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs:
            found = _operated(ufunc, inputs)
            if found is not None:
                return found
        return _plainly(ufunc, method, inputs, kwargs)

    def __array_function__(
        self, function: Any, _types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if function is np.transpose and len(args) <= 2 and not kwargs:
            return self.transpose(*args[1:])
        return function(*map(_plain, args), **{k: _plain(v) for k, v in kwargs.items()})

    def __getitem__(self, key: Any) -> Any:
        part = self.pixels.part(key)
        return computed(self.pixels)[key] if part is None else LazyArray(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise UnfollowableError("an image is written to after it was scaled")

    def __len__(self) -> int:
        return len(self.pixels.view)

    def __getattr__(self, name: str) -> Any:
        return getattr(computed(self.pixels), name)


def _operator(name: str, *, is_turned: bool = False) -> Callable[[Any, Any], Any]:
    ufunc = getattr(np, name)

    def operate(self: LazyArray, other: Any) -> Any:
        return ufunc(other, self) if is_turned else ufunc(self, other)

    return operate


def _in_place(name: str) -> Callable[[LazyArray, Any], LazyArray]:
    ufunc = getattr(np, name)

    def change(self: LazyArray, other: Any) -> LazyArray:
        pixels = self.pixels
        if pixels.has_other_views():
            raise UnfollowableError("an image is changed in place while a view of it is in use")
        found = _operated(ufunc, (self, other))
        if found is None or not np.can_cast(found.dtype, self.dtype, "same_kind"):
            raise UnfollowableError(f"numpy.{name} in place could not be followed")
        self.pixels = converted(found.pixels, self.dtype).pixels
        return self

    return change


for _word, _name in {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
}.items():
    setattr(LazyArray, f"__{_word}__", _operator(_name))
    setattr(LazyArray, f"__r{_word}__", _operator(_name, is_turned=True))
    setattr(LazyArray, f"__i{_word}__", _in_place(_name))


def converted(pixels: Pixels, dtype: "np.dtype[Any]") -> LazyArray:
    """Return the pixels with their levels in another type."""
    grid = pixels.grid
    if grid.levels.dtype == dtype:
        return LazyArray(pixels.copied())
    steps = None if grid.steps is None else (*grid.steps, ("astype", dtype, False))
    return LazyArray(pixels.derived(grid.after(grid.levels.astype(dtype), steps), pixels.axis))


def computed(pixels: Pixels) -> "np.ndarray[Any, Any]":
    """Return the array that the pixels stand for."""
    levels = pixels.grid.levels
    values = np.ascontiguousarray(pixels.bytes) if pixels.is_ordered else pixels.bytes
    values = with_colours(values, pixels)
    made = np.empty_like(values, dtype=levels.dtype)
    targets, sources = planes(made, pixels.axis), planes(values, pixels.axis)
    for channel, (target, source) in enumerate(zip(targets, sources, strict=True)):
        target[...] = levels[channel if len(levels) > 1 else 0][source]
    return made


def with_colours(values: "np.ndarray[Any, Any]", pixels: Pixels) -> "np.ndarray[Any, Any]":
    """Return the bytes after the changes of colour that are still to be made."""
    colours = pixels.grid.colours
    if not colours:
        return values
    assert pixels.axis is not None, "the channels of a picture whose colours wait are known"
    import torch

    from flatout.data.colours import coloured

    with torch._C.DisableTorchFunction():
        source = torch.from_numpy(np.ascontiguousarray(values))
        has_batch = values.ndim > 3
        made: np.ndarray[Any, Any] = coloured(
            source, pixels.axis, colours, has_batch=has_batch
        ).numpy()
    return made


def _begin(values: "np.ndarray[Any, Any]") -> Pixels:
    """Follow an array; one that could be written to afterwards is copied."""
    plain = values.view(np.ndarray)
    return follow(plain.copy("K") if plain.flags.writeable else plain)


def _operated(ufunc: Any, inputs: Sequence[Any]) -> LazyArray | None:
    """Apply a function of two arguments to the levels; None where it cannot be followed."""
    name = ufunc.__name__ if ufunc is not np.true_divide else "divide"
    if name not in FOLLOWED or len(inputs) != 2:
        return None
    followed = [isinstance(item, ByteArray | LazyArray) for item in inputs]
    if all(followed):
        return None
    subject, constant = inputs if followed[0] else inputs[::-1]
    if not isinstance(constant, int | float | np.generic | np.ndarray):
        return None
    pixels = subject.pixels if isinstance(subject, LazyArray) else _begin(subject)
    found = column(constant, pixels)
    if found is None:
        return None
    value, axis = found
    levels = pixels.grid.levels
    made = ufunc(levels, value) if followed[0] else ufunc(value, levels)
    steps = None
    if pixels.grid.steps is not None:
        steps = (*pixels.grid.steps, (name, value, not followed[0]))
    return LazyArray(pixels.derived(pixels.grid.after(made, steps), axis))


def _plain(value: Any) -> Any:
    """Return a value with true arrays, also in the lists that `stack` and its like take."""
    return map_leaves(value, _plain_leaf)


def _plain_leaf(value: Any) -> Any:
    if isinstance(value, LazyArray):
        return computed(value.pixels)
    return value.view(np.ndarray) if isinstance(value, ByteArray) else value


def _plainly(ufunc: Any, method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let numpy do it, with true arrays."""
    options = dict(kwargs)
    if "out" in options:
        if any(isinstance(item, LazyArray) for item in options["out"]):
            raise UnfollowableError(f"numpy.{ufunc.__name__} writes into a scaled image")
        options["out"] = tuple(map(_plain, options["out"]))
    return getattr(ufunc, method)(*map(_plain, inputs), **options)
