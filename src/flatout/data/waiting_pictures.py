"""Pictures of Pillow's whose changes of colour wait until somebody asks for their pixels."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance

from flatout.data.colours import ENHANCEMENTS, Colours


class Coloured(Image.Image):
    """Looks like the changed picture; its pixels are made when somebody asks for them."""

    def __init__(self, base: Any, colours: Colours) -> None:
        super().__init__()
        self._mode, self._size = base.mode, base.size
        self.info = dict(base.info)
        self.base, self.colours = base, colours

    @property
    def im(self) -> Any:
        """The pixels, by Pillow itself."""
        if self._im is None:
            self._im = made_by_pillow(self.base, self.colours)._im
        return self._im

    @im.setter
    def im(self, value: Any) -> None:
        self._im = value

    @property
    def is_put_off(self) -> bool:
        """Whether nobody has asked for the pixels yet."""
        return self._im is None

    def load(self) -> Any:
        """Make the pixels."""
        assert self.im is not None
        return super().load()

    def transpose(self, method: Any) -> Any:
        """Mirror the picture beneath: what is still to be done is the same for both."""
        mirrored = (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM)
        if self.is_put_off and method in mirrored:
            return Coloured(self.base.transpose(method), self.colours)
        return super().transpose(method)

    def convert(self, mode: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Stay as it is for its own mode."""
        if self.is_put_off and mode == self.mode and not args and not kwargs:
            return Coloured(self.base, self.colours)
        return super().convert(mode, *args, **kwargs)


def made_by_pillow(base: Any, colours: Colours) -> Any:
    """Return the picture as Pillow itself makes it."""
    made = base
    for kind, factor in colours:
        made = _plain(getattr(ImageEnhance, kind), made).enhance(factor)
    return made


_ORIGINAL: dict[Any, Callable[..., Any]] = {}
"""The constructors that were replaced."""


def _plain(kind: Any, picture: Any) -> Any:
    """Return one of Pillow's enhancers as if nothing had been replaced."""
    enhancer = kind.__new__(kind)
    _ORIGINAL.get(kind, kind.__init__)(enhancer, picture)
    return enhancer


@contextmanager
def putting_off(is_here: Callable[[], bool]) -> Iterator[None]:
    """Let Pillow's enhancements of colour pictures wait, in threads for which `is_here` says so."""
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
        yield
    finally:
        owner._Enhance.enhance = enhance
        for kind in kinds:
            kind.__init__ = _ORIGINAL.pop(kind)


def _begin(original: Callable[..., Any], is_here: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def begin(enhancer: Any, image: Any) -> None:
        if type(enhancer).__name__ in ENHANCEMENTS and is_here() and can_wait(image):
            # A copy: what the script does to its picture afterwards is not in the changed one.
            enhancer.image = image if waiting_in(image) else image.copy()
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
        change = (type(enhancer).__name__, float(np.float32(factor)))
        if waiting_in(image):
            return Coloured(image.base, (*image.colours, change))
        return Coloured(image, (change,))

    return enhance


def can_wait(image: Any) -> bool:
    """Tell whether an image is a colour picture of Pillow's own classes, in memory or in a file."""
    return getattr(image, "mode", "") == "RGB" and hasattr(image, "getbands")


def waiting_in(picture: Any) -> Colours:
    """Return what is still to be done to a picture; nothing for an ordinary one."""
    return picture.colours if type(picture) is Coloured and picture.is_put_off else ()
