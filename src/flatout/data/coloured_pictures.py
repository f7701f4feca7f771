"""Pictures of Pillow's whose changes of colour wait until somebody asks for their pixels."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance

from flatout.data import hue_pictures
from flatout.data.colours import ENHANCEMENTS, HUE, Colour, Colours
from flatout.data.waiting import Waiting, is_colour_picture, is_put_off


class Coloured(Waiting):
    """Looks like the changed picture."""

    def __init__(self, base: Any, colours: Colours) -> None:
        super().__init__(base.mode, base.size, base.info)
        self.base, self.colours = base, colours

    def made(self) -> Any:
        """Return the picture as Pillow itself makes it."""
        return made_by_pillow(self.base, self.colours)

    def again(self) -> "Coloured":
        """Return another one like it."""
        return Coloured(self.base, self.colours)

    def transpose(self, method: Any) -> Any:
        """Mirror the picture beneath: what is still to be done is the same for both."""
        mirrored = (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM)
        if self.is_put_off and method in mirrored:
            return Coloured(self.base.transpose(method), self.colours)
        return super().transpose(method)


def made_by_pillow(base: Any, colours: Colours) -> Any:
    """Return the picture as Pillow itself makes it."""
    made = base
    for kind, factor in colours:
        if kind == HUE:
            made = hue_pictures.turned_by_pillow(made, int(factor))
        else:
            made = _plain(getattr(ImageEnhance, kind), made).enhance(factor)
    return made


def changed(picture: Any, change: Colour) -> Coloured:
    """Return the picture with one more change that waits."""
    if waiting_in(picture):
        return Coloured(picture.base, (*picture.colours, change))
    return Coloured(picture, (change,))


_ORIGINAL: dict[Any, Callable[..., Any]] = {}
"""The constructors that were replaced."""


def _plain(kind: Any, picture: Any) -> Any:
    """Return one of Pillow's enhancers as if nothing had been replaced."""
    enhancer = kind.__new__(kind)
    _ORIGINAL.get(kind, kind.__init__)(enhancer, picture)
    return enhancer


@contextmanager
def putting_off(is_here: Callable[[], bool]) -> Iterator[None]:
    """Let Pillow's changes of colour wait, in threads for which `is_here` says so."""
    if _ORIGINAL:  # another thread does it already
        yield
        return
    owner: Any = ImageEnhance
    kinds = [getattr(owner, name) for name in ENHANCEMENTS]
    enhance = owner._Enhance.enhance
    for kind in kinds:
        _ORIGINAL[kind] = kind.__init__
        kind.__init__ = _begin(kind.__init__, is_here)
    owner._Enhance.enhance = _enhance(enhance)
    try:
        with hue_pictures.putting_off(is_here, changed):
            yield
    finally:
        owner._Enhance.enhance = enhance
        for kind in kinds:
            kind.__init__ = _ORIGINAL.pop(kind)


def _begin(original: Callable[..., Any], is_here: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def begin(enhancer: Any, image: Any) -> None:
        if type(enhancer).__name__ in ENHANCEMENTS and is_here() and is_colour_picture(image):
            # A copy: what the script does to its picture afterwards is not in the changed one.
            enhancer.image = image.again() if is_put_off(image) else image.copy()
        else:
            original(enhancer, image)

    return begin


def _enhance(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def enhance(enhancer: Any, factor: float) -> Any:
        if "degenerate" in vars(enhancer):
            return original(enhancer, factor)
        image = enhancer.image
        # Pillow takes it in single precision.
        return changed(image, (type(enhancer).__name__, float(np.float32(factor))))

    return enhance


def waiting_in(picture: Any) -> Colours:
    """Return what is still to be done to a picture; nothing for an ordinary one."""
    return picture.colours if type(picture) is Coloured and picture.is_put_off else ()
