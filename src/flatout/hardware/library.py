"""Find installed shared libraries that a trial may preload."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

TCMALLOC = ("libtcmalloc_minimal.so*", "libtcmalloc.so*")
"""The allocator alone first: the full library brings a heap profiler that nothing here uses."""

PLACES = (
    "/usr/lib/{machine}-linux-gnu",
    "/lib/{machine}-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/opt/homebrew/lib",
)
"""Where Debian, Red Hat, a local build and Homebrew put libraries."""


def find_tcmalloc(folders: Sequence[Path] | None = None) -> str | None:
    """Return the path of an installed tcmalloc, or None."""
    places = tuple(_library_folders()) if folders is None else folders
    for pattern in TCMALLOC:
        for folder in places:
            for path in sorted(folder.glob(pattern)):
                if path.is_file():  # a dangling link is not
                    return str(path)
    return None


def _library_folders() -> Iterator[Path]:
    for text in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if text:
            yield Path(text)
    yield Path(sys.prefix) / "lib"
    for place in PLACES:
        yield Path(place.format(machine=os.uname().machine))
