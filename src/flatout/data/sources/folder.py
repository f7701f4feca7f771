"""A folder of images: one sub-folder per class, or images alone.

The samples and their numbers are those of torchvision's `ImageFolder`: classes and files sorted by
name, files below sub-folders of a class too.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.format import RAISE, Field, Skipped
from flatout.data.pictures import SUFFIXES
from flatout.data.sources.source import Contents, fingerprint_of, need_samples, read_file, stamp_of
from flatout.records.errors import UserError

IMAGE = Field(name="image", kind="image")
LABEL = Field(name="label", kind="int")
LISTED = tuple(suffix for suffix in SUFFIXES if suffix != ".gif")
"""What is an image to `ImageFolder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Image files and the numbers of their classes."""

    contents: Contents
    names: tuple[str, ...]
    labels: "np.ndarray[Any, np.dtype[np.int64]]" = field(repr=False)
    """Empty without classes."""

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the path below the folder."""
        return self.names[index]

    def read(self, index: int) -> tuple[Any, ...]:
        """Return the file's bytes and the class."""
        data = read_file(Path(self.contents.root, self.names[index]))
        return (data, int(self.labels[index])) if len(self.labels) else (data,)

    def fingerprint(self) -> str:
        """Return a hash of names, sizes and times of writing."""
        root = self.contents.root
        return fingerprint_of(f"{name} {stamp_of(f'{root}/{name}')}" for name in self.names)


def open_folder(root: Path, *, on_bad: str) -> Folder:
    """Return the images below a folder.

    Raises:
        UserError: if there are none, or a folder cannot be read under the policy `raise`.
    """
    skipped: list[Skipped] = []

    def note(error: OSError) -> None:
        name, reason = str(error.filename), f"the folder cannot be read ({error.strerror})"
        if on_bad == RAISE:
            raise UserError(f"{name}: {reason}; --on-bad skip leaves it out and lists it")
        skipped.append(Skipped(name=name, reason=reason))

    root = root.resolve()
    folders = sorted(item.name for item in os.scandir(root) if item.is_dir())
    plain = [name for name in folders if not name.startswith(".")]
    # To torchvision a hidden folder is a class like any other, and a GIF is no image. Classes
    # without images it refuses, so what it takes has neither hidden ones nor GIFs alone.
    classes = [name for name in folders if plain and (name in plain or _has_images(root, name))]
    found = [
        (path, number)
        for number, name in enumerate(classes or [""])
        for path in files_below(root, name, note)
    ]
    images = [pair for pair in found if pair[0].lower().endswith(LISTED)]
    if not classes or not images:
        images = [pair for pair in found if pair[0].lower().endswith(SUFFIXES)]
    names = [os.path.relpath(path, root) for path, _ in images]
    labels = [number for _, number in images]
    need_samples(len(names), f"{root} and the folders in it")
    contents = Contents(
        kind="folder",
        fields=(IMAGE, LABEL) if classes else (IMAGE,),
        structure="tuple" if classes else "single",
        root=str(root),
        label=LABEL.name if classes else "",
        classes=tuple(classes),
        skipped=tuple(skipped),
        is_named=True,
        ignored=len(found) - len(images),
    )
    numbers = np.asarray(labels if classes else [], dtype=np.int64)
    return Folder(contents=contents, names=tuple(names), labels=numbers)


def _has_images(root: Path, name: str) -> bool:
    return any(path.lower().endswith(LISTED) for path in files_below(root, name, lambda _: None))


def files_below(root: Path, name: str, note: Any) -> Iterator[str]:
    """Give the paths of all files below a folder of a root; a link to a folder above ends there."""
    found, folder = [], root / name
    above = {str(folder): {_identity(root), _identity(folder)}}
    for where, folders, files in os.walk(folder, onerror=note, followlinks=True):
        chain = above.pop(where)
        for below in list(folders):
            path = os.path.join(where, below)  # noqa: PTH118  as os.walk names it
            identity = _identity(path)
            if identity in chain:
                folders.remove(below)  # a link to a folder above: its images were counted there
            else:
                above[path] = chain | {identity}
        found.append((where, sorted(files)))
    for where, names in sorted(found):
        for file in names:
            yield str(Path(where, file))


def _identity(folder: str | Path) -> tuple[int, int]:
    try:
        known = os.stat(folder)  # noqa: PTH116  a text or a path
    except OSError:
        return (0, 0)
    return known.st_dev, known.st_ino
