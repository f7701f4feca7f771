"""Pictures of Pillow's that are resized only when somebody asks for their pixels.

Until then a picture holds the window of pixels that its result is made of, so that a batch of them
can be scaled at once, elsewhere. What is unusual (another mode, a filter that is not followed,
`reducing_gap`, a large photograph whose window is much larger than the result) is resized at once.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from flatout.data.resizing import find_asked
from flatout.data.scaling import CHANNELS, REACH, Cut, find_order, window_of
from flatout.data.unmade import Unmade
from flatout.data.waiting import Waiting, is_colour_picture, is_put_off

MOST_LARGER = 4
"""Times as many pixels as the result: a larger window costs more to send than to scale."""
MIN_PIXELS = 32 * 32
"""Of a result: less is not worth it."""


class Scaled(Waiting):
    """Looks like the resized picture."""

    def __init__(self, window: "np.ndarray[Any, Any]", cut: Cut, info: dict[Any, Any]) -> None:
        super().__init__("RGB", cut.size, info)
        self.window, self.cut = window, cut

    def made(self) -> Any:
        """Return the picture, by the same arithmetic as a batch's."""
        unmade = Unmade(self.window, [self.cut])
        unmade.make()
        return Image.frombuffer("RGB", self.cut.size, unmade.room.tobytes(), "raw", "RGB", 0, 1)

    def again(self) -> "Scaled":
        """Return another one like it."""
        return Scaled(self.window, self.cut, self.info)

    def copy(self) -> Any:
        """Stay as it is: nobody writes to the window."""
        return self.again() if self.is_put_off else super().copy()

    def transpose(self, method: Any) -> Any:
        """Note that the result is mirrored."""
        cut = self.cut
        if self.is_put_off and method == Image.Transpose.FLIP_LEFT_RIGHT:
            return Scaled(self.window, replace(cut, is_mirrored=not cut.is_mirrored), self.info)
        if self.is_put_off and method == Image.Transpose.FLIP_TOP_BOTTOM:
            turned = replace(cut, is_upside_down=not cut.is_upside_down)
            return Scaled(self.window, turned, self.info)
        return super().transpose(method)


_ORIGINAL: list[Callable[..., Any]] = []
"""The method that is replaced; at most one."""


@contextmanager
def putting_off(is_here: Callable[[], bool]) -> Iterator[None]:
    """Let Pillow's resizing of colour pictures wait, in threads for which `is_here` says so."""
    if _ORIGINAL:  # another thread does it already
        yield
        return
    find_order()
    kind: Any = Image.Image
    original = kind.resize
    _ORIGINAL.append(original)
    kind.resize = _resize(original, is_here)
    try:
        yield
    finally:
        kind.resize = original
        _ORIGINAL.clear()


def _resize(original: Callable[..., Any], is_here: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resize(
        image: Any, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None
    ) -> Any:
        may_wait = is_here() and is_colour_picture(image) and not is_put_off(image)
        found = _later(image, size, resample, box) if may_wait and reducing_gap is None else None
        return original(image, size, resample, box, reducing_gap) if found is None else found

    return resize


def _later(image: Any, size: Any, resample: Any, box: Any) -> Scaled | None:
    """Return the picture that is resized later; None where it should be resized now."""
    asked = find_asked(image.size, size, resample, box)
    if asked is None or asked[1] not in REACH:
        return None
    to_size, kind, (left, top, right, bottom) = asked
    edges = (left, top, right, bottom)
    window = window_of(image.size, edges, to_size, kind)
    cut = Cut(
        source=image.size,
        box=edges,
        window=window,
        size=to_size,
        kind=kind,
        is_down_first=find_order()(image.size, to_size),
    )
    made = to_size[0] * to_size[1]
    if made < MIN_PIXELS or cut.pixels > MOST_LARGER * made:
        return None
    # A copy: what the script does to its picture afterwards is not in the result.
    pixels = np.frombuffer(image.crop(window).tobytes(), np.uint8).reshape(-1, CHANNELS)
    return Scaled(pixels, cut, image.info)
