"""Pictures of Pillow's that go to the mode HSV and back, whose hue is turned later.

So torchvision turns a hue, and scripts do by hand: convert to HSV, split, add to the array of the
hue, merge, convert back. Nothing of it is computed as long as nobody asks for more than that.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from PIL import Image

from flatout.core.nested import map_leaves
from flatout.data.colours import HUE
from flatout.data.levels import UnfollowableError
from flatout.data.waiting import Waiting, is_colour_picture, is_put_off

Change: TypeAlias = Callable[[Any, tuple[str, float]], Any]
"""Puts off one more change of colour of a picture."""
LEVELS = 256
BANDS = 3
TORCHVISION = "torchvision.transforms._functional_pil"
"""It makes pictures of arrays by a function of its own."""


class Apart(Waiting):
    """Looks like a picture in the mode HSV."""

    def __init__(self, base: Any, shift: int, change: Change) -> None:
        super().__init__("HSV", base.size, base.info)
        self.base, self.shift, self.change = base, shift, change

    def made(self) -> Any:
        """Return the picture as Pillow itself makes it."""
        return _apart_by_pillow(self.base, self.shift)

    def again(self) -> "Apart":
        """Return another one like it."""
        return Apart(self.base, self.shift, self.change)

    def split(self) -> Any:
        """Return the bands."""
        if not self.is_put_off:
            return super().split()
        return tuple(Band(self, number) for number in range(BANDS))

    def convert(self, mode: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Put off the way back."""
        if self.is_put_off and mode == "RGB" and not args and not kwargs:
            return self.change(self.base, (HUE, float(self.shift)))
        return super().convert(mode, *args, **kwargs)

    def as_array(self, make: Callable[[Any], Any]) -> Any:
        """Return the picture as an ordinary array."""
        return make(self)


class Band(Waiting):
    """Looks like one band of a picture in the mode HSV."""

    def __init__(self, whole: Apart, number: int) -> None:
        super().__init__("L", whole.size, whole.info)
        self.whole, self.number = whole, number

    def made(self) -> Any:
        """Return the band as Pillow itself makes it."""
        return _apart_by_pillow(self.whole.base, self.whole.shift).split()[self.number]

    def again(self) -> "Band":
        """Return another one like it."""
        return Band(self.whole, self.number)

    def as_array(self, make: Callable[[Any], Any]) -> Any:
        """Return the hue as an array that is followed, another band as an ordinary one."""
        return make(self) if self.number else HueArray(self.whole)


class HueArray(NDArrayOperatorsMixin):
    """Stands for the array of a hue.

    What is added to it is noted. Anything else is asked of the array itself, which is then computed
    and no longer followed.
    """

    __slots__ = ("is_lent", "values", "whole")
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, whole: Apart) -> None:
        self.whole = whole
        self.values: np.ndarray[Any, Any] | None = None
        self.is_lent = False
        """Whether a picture was made of it: Pillow's would share its memory."""

    @property
    def is_followed(self) -> bool:
        """Whether nobody has asked for the array yet."""
        return self.values is None

    @property
    def computed(self) -> "np.ndarray[Any, Any]":
        """The array itself."""
        if self.values is None:
            band = Band(self.whole, 0).tobytes()
            self.values = np.frombuffer(band, np.uint8).reshape(self.shape).copy()
        return self.values

    @property
    def shape(self) -> tuple[int, ...]:
        """Height and width."""
        size: tuple[int, ...] = self.whole.size
        return size[::-1]

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Bytes."""
        return np.dtype(np.uint8)

    def copy(self, order: Any = "C") -> Any:
        """Return a copy."""
        return HueArray(self.whole) if self.values is None else self.values.copy(order)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Stay bytes, or be computed."""
        if np.dtype(dtype) == self.dtype and not args and not kwargs:
            return self.copy()
        return self.computed.astype(dtype, *args, **kwargs)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        del copy
        return self.computed.copy() if dtype is None else self.computed.astype(dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        is_own = out is None or out[0] is self
        is_plain = method == "__call__" and not kwargs
        found = _moved(ufunc, inputs) if is_own and is_plain else None
        if found is not None and out is None:
            return HueArray(found)
        if out is not None:
            self.check_owned()
        if found is not None and self.is_followed:
            self.whole = found
            return self
        if out is not None:
            kwargs["out"] = tuple(map(_plain, out))
        made = getattr(ufunc, method)(*map(_plain, inputs), **kwargs)
        return self if out is not None and out[0] is self else made

    def __array_function__(
        self, function: Any, _types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return function(*map(_plain, args), **{k: _plain(v) for k, v in kwargs.items()})

    def __getitem__(self, key: Any) -> Any:
        return self.computed[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.check_owned()
        self.computed[key] = value

    def check_owned(self) -> None:
        """Make sure that a change of this array changes nothing else.

        Raises:
            UnfollowableError: if a picture was made of it.
        """
        if self.is_lent:
            raise UnfollowableError("a hue is changed after a picture was made of it")

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.computed, name)


def _moved(ufunc: Any, inputs: Sequence[Any]) -> Apart | None:
    """Return the picture whose hue is the result; None where that is computed."""
    if ufunc is np.subtract and isinstance(inputs[0], HueArray):
        sign = -1
    elif ufunc is np.add:
        sign = 1
    else:
        return None
    hue, number = inputs if isinstance(inputs[0], HueArray) else inputs[::-1]
    added = _added(number)
    if added is None or not hue.is_followed:
        return None
    whole = hue.whole
    return Apart(whole.base, (whole.shift + sign * added) % LEVELS, whole.change)


def _added(number: Any) -> int | None:
    """Return what is added, if the sum of it and bytes is of bytes."""
    if isinstance(number, bool) or not isinstance(number, int | np.uint8 | np.ndarray):
        return None
    if isinstance(number, np.ndarray) and (number.ndim or number.dtype != np.uint8):
        return None
    value = int(number)
    # An int of Python's takes the array's type, or is refused where it does not fit.
    return value if 0 <= value < LEVELS else None


def _plain(value: Any) -> Any:
    """Return a value with true arrays, also in the lists that `stack` and its like take."""
    return map_leaves(value, lambda leaf: leaf.computed if isinstance(leaf, HueArray) else leaf)


_ORIGINAL: dict[str, Callable[..., Any]] = {}
"""Pillow's functions that were replaced, by their names."""


def turned_by_pillow(picture: Any, shift: int) -> Any:
    """Return a picture with its hue moved on, as Pillow itself makes it."""
    convert = _ORIGINAL.get("convert", Image.Image.convert)
    return convert(_apart_by_pillow(picture, shift), "RGB")


def _apart_by_pillow(picture: Any, shift: int) -> Any:
    """Return a picture in the mode HSV with its hue moved on."""
    convert = _ORIGINAL.get("convert", Image.Image.convert)
    merge = _ORIGINAL.get("merge", Image.merge)
    hue, *others = convert(picture, "HSV").split()
    moved = hue.point([(level + shift) % LEVELS for level in range(LEVELS)])
    return merge("HSV", (moved, *others))


@contextmanager
def putting_off(is_here: Callable[[], bool], change: Change) -> Iterator[None]:
    """Let the hue of colour pictures wait, in threads for which `is_here` says so.

    Args:
        is_here: tells of the running thread.
        change: puts off the change of a picture.
    """
    if _ORIGINAL:  # another thread does it already
        yield
        return
    owner: Any = Image
    places: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (owner.Image, "convert", functools.partial(_convert, is_here=is_here, change=change)),
        (owner, "merge", _merge),
        (owner, "fromarray", _fromarray),
    ]
    torchvision = sys.modules.get(TORCHVISION)
    if hasattr(torchvision, "_Image_fromarray"):
        places.append((torchvision, "_Image_fromarray", _fromarray))
    for place, name, make in places:
        _ORIGINAL[name] = getattr(place, name)
        setattr(place, name, make(_ORIGINAL[name]))
    try:
        yield
    finally:
        for place, name, _ in places:
            setattr(place, name, _ORIGINAL.pop(name))


def _convert(
    original: Callable[..., Any], is_here: Callable[[], bool], change: Change
) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert(image: Any, mode: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_asked = mode == "HSV" and not args and not kwargs
        if is_asked and is_here() and is_colour_picture(image):
            # A copy: what the script does to its picture afterwards is not in the result.
            return Apart(image.again() if is_put_off(image) else image.copy(), 0, change)
        return original(image, mode, *args, **kwargs)

    return convert


def _merge(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def merge(mode: Any, bands: Any) -> Any:
        found = tuple(bands)
        whole = _joined(found) if mode == "HSV" else None
        return original(mode, found) if whole is None else whole

    return merge


def _joined(bands: Sequence[Any]) -> Apart | None:
    """Return the picture of three bands, if those of one picture come together again."""
    if not all(type(band) is Band and band.is_put_off for band in bands):
        return None
    hue, *others = bands
    is_whole = [band.number for band in bands] == list(range(BANDS))
    is_one = all(band.whole.base is hue.whole.base for band in others)
    return hue.whole.again() if is_whole and is_one else None


def _fromarray(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fromarray(values: Any, mode: Any = None) -> Any:
        if isinstance(values, HueArray) and values.is_followed and mode in (None, "L"):
            values.is_lent = True
            return Band(values.whole, 0)
        options = {} if mode is None else {"mode": mode}
        return original(_plain(values), **options)

    return fromarray
