"""Let a data set that opens its images with Pillow find them in a packed store instead.

`Image.open(path)`, and `Image.open(file)` for an open file, give the store's image where the path
lies below the folder that was packed. Everything else of the data set stays as it is.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

from flatout.data import pictures
from flatout.data.packed_store import Store


class Redirect:
    """Images of a store by the paths of the files they were packed from."""

    def __init__(self, store: Store, root: str) -> None:
        self.store, self.root = store, root

    @cached_property
    def found(self) -> dict[str, int]:
        """The place of each image by its path below the root."""
        return {os.path.normpath(name): place for place, name in enumerate(self.store.names)}

    @cached_property
    def below(self) -> dict[str, str]:
        """Each folder that was asked for, as a path from the root: links are followed once."""
        return {}

    @cached_property
    def image_at(self) -> int:
        """Which field is the image."""
        return next(n for n, field in enumerate(self.store.header.fields) if field.kind == "image")

    @contextmanager
    def opened(self) -> Iterator[list[int]]:
        """Redirect Pillow in this thread; gives the places that were read, as they are read."""
        read: list[int] = []
        _install()
        before = getattr(_active, "redirect", None)
        _active.redirect = (self, read)
        try:
            yield read
        finally:
            _active.redirect = before

    def find(self, opened: Any) -> int | None:
        """Return the place of what was asked for, None where the store does not have it."""
        path = opened if isinstance(opened, str | os.PathLike) else getattr(opened, "name", None)
        if not isinstance(path, str | os.PathLike):
            return None
        folder, name = os.path.split(os.path.abspath(os.fspath(path)))  # noqa: PTH100  keeps links
        if folder not in self.below:
            self.below[folder] = os.path.relpath(Path(folder).resolve(), self.root)
        return self.found.get(os.path.normpath(os.path.join(self.below[folder], name)))  # noqa: PTH118

    def image(self, place: int) -> Any:
        """Return the stored image."""
        return pictures.open_image(self.store.parts(place)[self.image_at])


_active = threading.local()
_guard = threading.Lock()


def _install() -> None:
    """Put the switch into Pillow, once per process; it does nothing where no redirect is active."""
    from PIL import Image

    with _guard:
        plain = Image.open
        if getattr(plain, "is_flatout_redirect", False):
            return

        @wraps(plain)
        def open_redirected(fp: Any, mode: Any = "r", formats: Any = None) -> Any:
            active = getattr(_active, "redirect", None)
            place = active[0].find(fp) if active is not None else None
            if active is None or place is None:
                return plain(fp, mode, formats)
            active[1].append(place)
            return active[0].image(place)

        open_redirected.is_flatout_redirect = True  # type: ignore[attr-defined]
        Image.open = open_redirected
