"""Let another resampler resize Pillow's colour images, where it was seen to give the same.

Only RGB images whose memory is in one piece take the other way, with the five filters that average;
whatever is unusual (`reducing_gap`, another mode, a box outside the image) stays with Pillow, with
its own errors.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from flatout.agent import patching
from flatout.data.images.substitution import SubstituteState

BICUBIC = 3
"""Pillow's filter for colour where none is named."""
FILTERS = frozenset({1, 2, 3, 4, 5})
"""Lanczos, bilinear, bicubic, box and Hamming, by Pillow's numbers."""
Resample: TypeAlias = Callable[[Any, tuple[int, int], int, tuple[float, ...]], Any]
"""Image, size, filter and box to an image; None where it cannot."""
Asked: TypeAlias = tuple[tuple[int, int], int, tuple[float, ...]]


@dataclass(slots=True, kw_only=True)
class ResizeSwap(SubstituteState):
    """What became of the swap in this process; its kinds are filters."""

    resample: Resample


_ACTIVE: list[ResizeSwap] = []
"""The swap of this process; at most one."""


def swap_resize(resample: Resample) -> ResizeSwap:
    """Put a resampler under Pillow's `resize`, for this process; return what becomes of it."""
    from PIL import Image

    if _ACTIVE:
        return _ACTIVE[0]
    swap = ResizeSwap(resample=resample)

    def resampling(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def resize(
            image: Any, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None
        ) -> Any:
            is_usual = image.mode == "RGB" and reducing_gap is None and not swap.trouble
            asked = find_asked(image.size, size, resample, box) if is_usual else None
            if asked is None:
                return original(image, size, resample, box, reducing_gap)
            image.load()
            return _resized(swap, image, asked, original)

        return resize

    patch = patching.wrap(Image.Image, "resize", resampling)

    def undo() -> None:
        if swap in _ACTIVE:
            patch.undo()
            _ACTIVE.clear()

    swap.undo = undo
    _ACTIVE.append(swap)
    return swap


def find_asked(image_size: tuple[int, int], size: Any, resample: Any, box: Any) -> Asked | None:
    """Return what a call of `resize` asks for; None where Pillow should answer itself.

    >>> find_asked((8, 6), (4, 3), None, None)
    ((4, 3), 3, (0, 0, 8, 6))
    >>> find_asked((8, 6), (8, 6), 2, None), find_asked((8, 6), (4, 3), 2, (0, 0, 9, 6))
    (None, None)
    """
    try:
        width, height = size
        kind = BICUBIC if resample is None else int(resample)
        whole = (0, 0, *image_size)
        left, top, right, bottom = edges = whole if box is None else tuple(box)
        fits = 0 <= left < right <= image_size[0] and 0 <= top < bottom <= image_size[1]
    except (TypeError, ValueError):
        return None
    is_made = type(width) is int and type(height) is int and width > 0 and height > 0
    is_copy = (width, height) == tuple(image_size) and edges == whole
    if not (fits and is_made) or is_copy or kind not in FILTERS:
        return None
    return (width, height), kind, edges


def _resized(swap: ResizeSwap, image: Any, asked: Asked, original: Callable[..., Any]) -> Any:
    size, kind, box = asked
    made = swap.resample(image, size, kind, box)
    if made is None:
        return original(image, size, kind, box)
    if not swap.is_compared(kind):
        swap.made += 1
        return made
    expected = original(image, size, kind, box)
    swap.compared += 1
    if made.tobytes() != expected.tobytes():
        swap.trouble = f"an image of {image.width} x {image.height} comes out different"
    return expected
