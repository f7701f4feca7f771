"""Pillow's resampling of colour images by vector instructions, to the bit.

The plain reference is Pillow itself. Its two passes round in between, so their order shows; which
comes first depends on Pillow's version, and is found out by trying.
"""

import ctypes
import functools
import random
from collections.abc import Callable
from typing import Any, TypeAlias

from flatout.kernels.compiled import load_function
from flatout.records.errors import NotApplicable

KINDS = frozenset({1, 2, 3, 4, 5})
"""Lanczos, bilinear, bicubic, box and Hamming by Pillow's numbers. Nearest is quick as it is."""
TRIED = 24
"""Pictures by which the order of the passes is found; one alone tells in a third of the cases."""
Size: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[float, float, float, float]
Order: TypeAlias = Callable[[Size, Size], bool]


class _Array(ctypes.Structure):
    """The beginning of Arrow's description of an array: the public way to Pillow's memory."""


_Array._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))),
]


def across_first(size: Size, to_size: Size) -> bool:
    """Return whether the columns come first: never, in Pillow before 13."""
    return False


def tall_first(size: Size, to_size: Size) -> bool:
    """Return whether the columns come first: where the height shrinks by more, in Pillow 13.

    >>> tall_first((500, 375), (224, 224)), tall_first((300, 500), (224, 224))
    (False, True)
    """
    lost = size[1] - to_size[1]
    return lost > max(0, 2 * (size[0] - to_size[0]))


ORDERS: tuple[Order, ...] = (tall_first, across_first)


def resampled(image: Any, size: Size, kind: int, box: Box, order: Order) -> Any:
    """Return the RGB image resampled; None where its memory is not in one piece."""
    from PIL import Image

    core: Any = vars(Image)["core"]
    source = _memory(image.im)
    made = core.new("RGB", size)
    target = _memory(made)
    if source is None or target is None:
        return None
    trouble = _function()(
        source[0],
        (ctypes.c_int * 2)(*image.size),
        target[0],
        (ctypes.c_int * 2)(*size),
        (ctypes.c_float * 4)(*box),
        kind,
        int(order(image.size, size)),
    )
    return None if trouble else image._new(made)


def _memory(core: Any) -> tuple[int, Any] | None:
    """Return the address of an image's pixels and what holds them; None where scattered."""
    try:
        capsule = core.__arrow_c_array__()
    except ValueError:  # more than one block of memory
        return None
    array = _Array.from_address(int(_get_pointer()(capsule, b"arrow_array")))
    width, height = core.size
    if array.n_children != 1 or array.length != width * height or array.offset:
        return None
    address = array.children[0].contents.buffers[1]
    return (address, capsule) if address else None


@functools.cache
def _function() -> Any:
    pointers, numbers = (ctypes.c_void_p,) * 5, (ctypes.c_int,) * 2
    return load_function("resample", "resample", *pointers, *numbers)


@functools.cache
def _get_pointer() -> Any:
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    return prototype(("PyCapsule_GetPointer", ctypes.pythonapi))


@functools.cache
def find_order() -> Order:
    """Return how this Pillow orders the passes."""
    from PIL import Image

    core: Any = vars(Image)["core"]
    if not hasattr(core.new("RGB", (1, 1)), "__arrow_c_array__"):
        raise NotApplicable("this Pillow does not show its memory; 11.3 and later do")
    _function()
    cases = [_case(random.Random(number)) for number in range(TRIED)]
    for order in ORDERS:
        if all(_is_same(*case, order) for case in cases):
            return order
    raise NotApplicable("this Pillow resamples in a way that is not known here")


def _case(draw: random.Random) -> tuple[Any, Size, int, Box]:
    """Return a picture of black and white dots, which round the most, and what to make of it."""
    from PIL import Image

    width, height = draw.randint(9, 90), draw.randint(9, 90)
    dots = bytes(draw.choices((0, 255), k=3 * width * height))
    left, top = draw.uniform(0, 0.6 * width), draw.uniform(0, 0.6 * height)
    box = (left, top, draw.uniform(left + 2, width), draw.uniform(top + 2, height))
    size = (draw.randint(2, 90), draw.randint(2, 90))
    image = Image.frombytes("RGB", (width, height), dots)
    return image, size, draw.choice(sorted(KINDS)), box


def _is_same(image: Any, size: Size, kind: int, box: Box, order: Order) -> bool:
    made = resampled(image, size, kind, box, order)
    return made is not None and made.tobytes() == image.resize(size, kind, box).tobytes()
