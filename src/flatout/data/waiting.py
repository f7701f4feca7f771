"""Pictures of Pillow's that look made, whose pixels are made when somebody asks for them."""

from typing import Any

from PIL import Image


class Waiting(Image.Image):
    """Looks like the picture that it will be."""

    def __init__(self, mode: str, size: tuple[int, int], info: dict[Any, Any]) -> None:
        super().__init__()
        self._mode, self._size, self.info = mode, size, dict(info)

    def made(self) -> Any:
        """Return the picture itself."""
        raise NotImplementedError

    def again(self) -> "Waiting":
        """Return another one like it."""
        raise NotImplementedError

    @property
    def im(self) -> Any:
        """The pixels."""
        if self._im is None:
            self._im = self.made()._im
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

    def convert(self, mode: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Stay as it is for its own mode."""
        if self.is_put_off and mode == self.mode and not args and not kwargs:
            return self.again()
        return super().convert(mode, *args, **kwargs)


def is_put_off(picture: Any) -> bool:
    """Tell whether a picture is one whose pixels nobody has asked for yet."""
    return isinstance(picture, Waiting) and picture.is_put_off


def is_colour_picture(image: Any) -> bool:
    """Tell whether an image is a colour picture of Pillow's own classes, in memory or in a file."""
    return getattr(image, "mode", "") == "RGB" and hasattr(image, "getbands")
