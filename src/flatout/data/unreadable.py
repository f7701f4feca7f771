"""Samples that cannot be read: which errors mean that, which file it was, and how many there were.

What is left out is noted in a file without a name that a training process shares with its loader's
workers, however these were started; it is gone with the last of them.
"""

import fcntl
import io
import json
import os
import pickle
import re
import struct
import sys
import weakref
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from gzip import BadGzipFile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from flatout.data.store import anonymous_file

BROKEN = (
    *(FileNotFoundError, EOFError, BadGzipFile, zlib.error, struct.error),
    *(zipfile.BadZipFile, pickle.UnpicklingError),
)
"""What a file that is gone, cut short or overwritten is read with, by Python's own readers."""
OF_PACKAGES = {"PIL": (SyntaxError,), "simplejpeg": (ValueError,)}
"""By the package that raised it, what it calls a broken file beside that: Pillow a PNG, simplejpeg
every JPEG. The same errors from anywhere else are somebody's mistake."""
NOT_OF_FILES = frozenset({"multiprocessing", "socket", "ssl", "subprocess"})
"""Packages that read from other processes: where these end, that is no broken file."""
UNKNOWN = re.compile(
    r"cannot identify image file (?:<_io\.\w+ name=)?(?:'([^'\n]+)'|\"([^\"\n]+)\")"
)
MAX_WORDS = 160
"""Characters of an error's text that are kept: enough for its reason."""


class UnreadableError(RuntimeError):
    """Too much cannot be read, or nothing can take its place; the text says which."""


def is_unreadable(error: BaseException) -> bool:
    """Tell whether an error means that one file cannot be read, and not that something else broke.

    Pillow's truncated and unknown pictures are an `OSError` without a number. One with a number is
    the system's: no space, no descriptors, no rights, a disk or a network that fails. It means many
    files or all of them.

    >>> is_unreadable(OSError("image file is truncated (12 bytes not processed)"))
    True
    >>> is_unreadable(OSError(28, "No space left on device")), is_unreadable(KeyError("label"))
    (False, False)
    """
    package = _raised_in(error)
    if package in NOT_OF_FILES:
        return False
    if isinstance(error, (*BROKEN, *OF_PACKAGES.get(package, ()))):
        return True
    return error.__class__ in _plain_kinds() and getattr(error, "errno", None) is None


def _plain_kinds() -> tuple[type, ...]:
    """Return the classes that mean a broken file when the system gave no number with them.

    Not what derives from them: a library for the network has errors of its own below `OSError`.
    """
    pillow = sys.modules.get("PIL")
    unknown = getattr(pillow, "UnidentifiedImageError", None)
    return (OSError,) if unknown is None else (OSError, unknown)


def _raised_in(error: BaseException) -> str:
    """Return the package whose code raised an error; empty where there is no traceback."""
    frames = list(frames_of(error.__traceback__))
    name = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return name.partition(".")[0]


def frames_of(traceback: TracebackType | None) -> Iterator[FrameType]:
    """Yield the frames of a traceback, the outermost first."""
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def words_of(error: BaseException) -> str:
    """Return an error in one line.

    >>> words_of(EOFError("Compressed file ended"))
    'EOFError: Compressed file ended'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_WORDS]


def file_of(error: BaseException) -> str:
    """Return the file that an error is about, as far as it or the code that raised it tells."""
    named = getattr(error, "filename", None)
    if isinstance(named, str | os.PathLike):
        return os.fspath(named)
    found = UNKNOWN.search(str(error))
    if found is not None:
        return found[1] or found[2]
    frames = list(frames_of(error.__traceback__))
    held = (value for frame in reversed(frames) for value in frame.f_locals.values())
    return next((path for value in held if (path := _path_of(value))), "")


def _path_of(value: Any) -> str:
    """Return the path that a local variable is, or that an opened file or picture comes from."""
    if isinstance(value, io.IOBase):
        value = getattr(value, "name", "")
    elif "filename" in getattr(value, "__dict__", ()):
        value = value.filename
    if not isinstance(value, str | Path) or not str(value):
        return ""
    try:
        return str(value) if Path(value).is_file() else ""
    except (OSError, ValueError):
        return ""  # too long for a path, or no text that could be one


class Log:
    """Lines that a training process and its loader's workers add to, each at once."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._open(anonymous_file())

    def _open(self, descriptor: int) -> None:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False

    def __getstate__(self) -> dict[str, int]:
        return {"owner": self.owner, "descriptor": self.descriptor}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.owner = state["owner"]
        self._open(os.open(f"/proc/{self.owner}/fd/{state['descriptor']}", os.O_RDWR))

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        os.write(self.descriptor, json.dumps(line).encode() + b"\n")

    def read(self, start: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return the whole lines from a place on, and the place after them."""
        size = os.fstat(self.descriptor).st_size
        raw = os.pread(self.descriptor, max(0, size - start), start)
        whole = raw[: raw.rfind(b"\n") + 1]
        return [json.loads(line) for line in whole.splitlines()], start + len(whole)


_logs: dict[int, Log] = {}
"""The log of this process, by its number: a copy that trains has its own."""


def own_log() -> Log:
    """Return the log of this process."""
    if os.getpid() not in _logs:
        _logs.clear()
        _logs[os.getpid()] = Log()
    return _logs[os.getpid()]


def forget() -> None:
    """Let this process begin a new log; loaders that are in use go on with the one they have."""
    _logs.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Samples that were left out."""

    count: int = 0
    epochs: int = 0
    """Begun, over all loaders."""
    names: Sequence[tuple[str, str]] = ()
    """Of each that differs its name and the error, in the order in which they were met."""
    by_process: Mapping[str, int] = field(default_factory=dict)
    """How many by each: a loader's worker, or the training process."""

    def sentence(self, most: int = 5) -> str:
        """Return what a person should know, with the first few names."""
        if not self.count:
            return "no sample was left out"
        shown = "; ".join(f"{name} ({error})" for name, error in self.names[:most])
        more = len(self.names) - most
        places = ", ".join(f"{count} by {who}" for who, count in sorted(self.by_process.items()))
        return (
            f"{self.count} samples left out in {self.epochs} epochs of loaders ({places}), "
            f"{len(self.names)} different ones: {shown}" + (f"; and {more} more" * (more > 0))
        )


def left_out(lines: Iterable[Mapping[str, Any]]) -> LeftOut:
    """Return what the lines of a log tell.

    >>> left_out([{"epoch": 1}]).sentence()
    'no sample was left out'
    """
    noted = list(lines)
    missed = [line for line in noted if "name" in line]
    return LeftOut(
        count=len(missed),
        epochs=sum("epoch" in line for line in noted),
        names=list({line["name"]: line["error"] for line in missed}.items()),
        by_process=Counter(line["who"] for line in missed),
    )
