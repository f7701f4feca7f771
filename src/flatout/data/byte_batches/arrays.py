"""Images of bytes in numpy that are followed rather than computed with."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from flatout.agent.nested import map_leaves
from flatout.data.byte_batches.levels import (
    Followed,
    Grid,
    Pixels,
    UnfollowableError,
    can_follow,
    column,
    follow,
    planes,
    refuse_shared,
)

FOLLOWED = ("add", "subtract", "multiply", "divide")
"""The arithmetic that is followed. Each is rounded correctly by every processor, so that 256 levels
and a whole image agree to the bit; functions such as `power` need not."""
READING = frozenset(
    (
        *("all", "any", "argmax", "argmin", "flags", "flatten", "item", "itemsize", "max", "mean"),
        *("min", "nbytes", "size", "std", "strides", "sum", "tobytes", "tolist", "var"),
    )
)
"""Attributes of an array, and functions, that give nothing of its memory away and write nothing
into it: what scripts log and check."""


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


class LazyArray(Followed, NDArrayOperatorsMixin):
    """Stands for the array that arithmetic on an image of bytes would have given."""

    __slots__ = ("_pixels", "made")
    __array_priority__ = 1000

    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels
        self.made: np.ndarray[Any, Any] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Pass for an array where code asks what this is an instance of."""
        return np.ndarray

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("pixels", "_pixels", "made"):
            raise UnfollowableError(f"{name} of a scaled image is set")
        object.__setattr__(self, name, value)

    def read(self) -> "np.ndarray[Any, Any]":
        """Return the array for a use that neither writes into it nor hands out its memory."""
        return computed(self._pixels) if self.made is None else self.made

    @property
    def shape(self) -> tuple[int, ...]:
        """Sides of the array."""
        return tuple(self._pixels.view.shape) if self.made is None else self.made.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Type that the values would have."""
        kind: np.dtype[Any] = self._pixels.grid.levels.dtype
        return kind

    @property
    def T(self) -> Any:  # noqa: N802  numpy's name
        """The axes turned round."""
        return self.transpose()

    def transpose(self, *order: Any) -> Any:
        """Put the axes into another order."""
        if self.made is not None:
            return self.made.transpose(*order)
        if len(order) == 1 and not isinstance(order[0], int):
            order = tuple(order[0] or ())
        return LazyArray(self.pixels.transposed(order or range(self.ndim)[::-1]))

    def astype(self, dtype: Any, order: Any = "K", **kwargs: Any) -> Any:
        """Convert the levels."""
        if self.made is not None:
            return self.made.astype(dtype, order, **kwargs)
        kept = self.pixels if order == "K" else self.pixels.ordered()
        if kept.grid.levels.dtype == np.dtype(dtype):
            if kwargs.get("copy", True):
                return LazyArray(kept.copied())
            # The same memory: whoever writes into one while both live fails.
            return LazyArray(kept.laid_out(kept.view, kept.axis, is_ordered=kept.is_ordered))
        return converted(kept, np.dtype(dtype))

    def copy(self, order: Any = "C") -> Any:
        """Return a copy."""
        if self.made is not None:
            return self.made.copy(order)
        return LazyArray((self.pixels if order == "K" else self.pixels.ordered()).copied())

    def __copy__(self) -> Any:
        return self.copy("K")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy("K")

    def __reduce__(self) -> Any:
        return self.read().__reduce__()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if copy or (dtype is not None and np.dtype(dtype) != self.dtype):
            return np.array(self.read(), dtype, order="K", copy=True)
        return self.settle()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        inputs = tuple(map(_settled, inputs))
        if method == "at" and isinstance(inputs[0], LazyArray):
            raise UnfollowableError(f"numpy.{ufunc.__name__}.at writes into a scaled image")
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
        is_reading = function.__name__ in READING and "out" not in kwargs
        plain = _read_leaf if is_reading else _settled_leaf
        return function(*map_leaves(list(args), plain), **map_leaves(dict(kwargs), plain))

    def __getitem__(self, key: Any) -> Any:
        part = None if self.made is not None else self.pixels.part(key)
        if part is not None:
            return LazyArray(part)
        found = self.read()[key]
        return found if isinstance(found, np.generic) else self.settle()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        # Also where the array is kept: `numpy.random.shuffle` takes this for a list of its rows.
        raise UnfollowableError("an image is written to after it was scaled")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.settle())

    def __len__(self) -> int:
        return len(self._pixels.view if self.made is None else self.made)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(np.ndarray, name):  # in numpy's words
            raise AttributeError(f"'numpy.ndarray' object has no attribute '{name}'")
        return getattr(self.read() if name in READING else self.settle(), name)


def _asked(name: str) -> Callable[..., Any]:
    def ask(self: LazyArray, *args: Any) -> Any:
        return getattr(self.read(), name)(*args)

    return ask


for _name in (
    *("__bool__", "__float__", "__int__", "__complex__", "__index__"),
    *("__contains__", "__repr__", "__str__", "__format__"),
):
    # Python asks the class for these: `__getattr__` is not enough.
    setattr(LazyArray, _name, _asked(_name))


def _operator(name: str, *, is_turned: bool = False) -> Callable[[Any, Any], Any]:
    ufunc = getattr(np, name)

    def operate(self: LazyArray, other: Any) -> Any:
        if getattr(type(other), "__array_ufunc__", self) is None:
            return NotImplemented
        return ufunc(other, self) if is_turned else ufunc(self, other)

    return operate


def _in_place(name: str) -> Callable[[LazyArray, Any], LazyArray]:
    ufunc = getattr(np, name)

    def change(self: LazyArray, other: Any) -> LazyArray:
        if self.made is not None:
            ufunc(self.made, _settled(other), out=self.made)
            return self
        refuse_shared(self.pixels, "is changed in place")
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
    return LazyArray(pixels.derived(Grid(grid.levels.astype(dtype), steps), pixels.axis))


def computed(pixels: Pixels) -> "np.ndarray[Any, Any]":
    """Return the array that the pixels stand for."""
    levels = pixels.grid.levels
    values = np.ascontiguousarray(pixels.view) if pixels.is_ordered else pixels.view
    made = np.empty_like(values, dtype=levels.dtype)
    targets, sources = planes(made, pixels.axis), planes(values, pixels.axis)
    for channel, (target, source) in enumerate(zip(targets, sources, strict=True)):
        target[...] = levels[channel if len(levels) > 1 else 0][source]
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
    if followed not in ([True, False], [False, True]):
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
    return LazyArray(pixels.derived(Grid(made, steps), axis))


def _settled(value: Any) -> Any:
    """Return the array of an image that was computed; anything else as it is."""
    return value.made if isinstance(value, LazyArray) and value.made is not None else value


def _read_leaf(value: Any) -> Any:
    if isinstance(value, LazyArray):
        return value.read()
    return value.view(np.ndarray) if isinstance(value, ByteArray) else value


def _settled_leaf(value: Any) -> Any:
    return value.settle() if isinstance(value, LazyArray) else _read_leaf(value)


def _plainly(ufunc: Any, method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let numpy do it, with true arrays: what a ufunc returns is memory of its own."""
    options = {name: _read_leaf(value) for name, value in kwargs.items() if name != "out"}
    if "out" in kwargs:
        targets = tuple(map(_settled, kwargs["out"]))
        if any(isinstance(item, LazyArray) for item in targets):
            raise UnfollowableError(f"numpy.{ufunc.__name__} writes into a scaled image")
        options["out"] = tuple(map(_read_leaf, targets))
    return getattr(ufunc, method)(*map_leaves(list(inputs), _read_leaf), **options)
