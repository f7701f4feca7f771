"""Bring all files of a data set into the page cache before they are needed, if they fit.

`WarmUp` is a thread of the training process that reads them. `find_files` tells it which file is
behind a sample: seen by watching what is opened, then read off the data set.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flatout.data.caching import free_memory_bytes
from flatout.data.packed_store import advise
from flatout.data.proof.forked import ForkedError, in_fork
from flatout.records.units import format_bytes

WATCHED = 6
"""Samples whose files are looked at: a list that fits six places by chance names files anyway."""
LIMIT_S = 20.0
MAX_DEPTH = 3
"""Data sets wrapped in one another that are looked into, such as a subset of a subset."""
MAX_PARTS = 4
"""Items of a pair of path and label, and the like, that are tried."""

FindFile = Callable[[int], str | None]


def find_files(dataset: Any) -> FindFile | None:
    """Return what tells the file of a sample by its number; None where no list names them.

    A few samples are made in a forked copy of the process while every `open` is noted. Where one
    list of the data set names those files at their places, it names the files of all other samples
    too.
    """
    count = len(dataset)
    if count == 0:
        return None
    numbers = sorted({round(i * (count - 1) / (WATCHED - 1)) for i in range(WATCHED)})
    try:
        opened: list[list[str]] = in_fork(lambda: watch_opens(dataset, numbers), LIMIT_S)
    except ForkedError:
        return None
    if not all(opened):
        return None
    return _read_off(dataset, numbers, opened, MAX_DEPTH)


def watch_opens(dataset: Any, numbers: Sequence[int]) -> list[list[str]]:
    """Return of each sample the files that making it opened to read. Cannot be switched off."""
    seen: list[str] = []

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(arguments[0]))  # noqa: PTH100  abspath follows no link
            if not path.startswith(("/proc/", "/sys/", "/dev/")):
                seen.append(path)

    sys.addaudithook(listen)
    found = []
    for number in numbers:
        seen.clear()
        dataset[number]
        found.append([path for path in dict.fromkeys(seen) if Path(path).is_file()])
    return found


def _read_off(
    dataset: Any, numbers: Sequence[int], opened: Sequence[Sequence[str]], depth: int
) -> FindFile | None:
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and indices is not None and depth:
        below = _read_off(inner, [int(indices[n]) for n in numbers], opened, depth - 1)
        return (lambda number: below(int(indices[number]))) if below else None
    for values in _lists(dataset, max(numbers)):
        for name in _namings(values):
            rule = _rule(name, numbers, opened)
            if rule is not None:
                return rule
    return None


def _lists(dataset: Any, last: int) -> list[Any]:
    """Return the attributes that have an item for every sample."""
    values = vars(dataset).values() if hasattr(dataset, "__dict__") else ()
    return [value for value in values if _length(value) > last]


def _length(value: Any) -> int:
    """Return the number of items of a list or the like, 0 for anything else."""
    if isinstance(value, str | bytes | dict | type) or not hasattr(value, "__getitem__"):
        return 0
    try:
        return len(value)
    except TypeError:
        return 0


def _namings(values: Any) -> list[Callable[[int], Any]]:
    """Return the ways to take a name out of an item: itself, or one of its parts."""
    ways: list[Callable[[int], Any]] = [lambda number: values[number]]
    try:
        first = values[0]
    except Exception:  # noqa: BLE001  a list of the user's own: whatever it raises, it names nothing
        return []
    if isinstance(first, list | tuple):
        ways += [
            lambda number, part=part: values[number][part]  # type: ignore[misc]
            for part in range(min(MAX_PARTS, len(first)))
        ]
    return ways


def _rule(
    name: Callable[[int], Any], numbers: Sequence[int], opened: Sequence[Sequence[str]]
) -> FindFile | None:
    """Return the rule from names to files, where one folder and one ending fit all that was seen.

    The name may be the whole path, or what is between a folder and an ending.
    """
    known: set[tuple[str, str]] | None = None
    for number, paths in zip(numbers, opened, strict=True):
        text = _text(name, number)
        if not text:
            return None
        around = {tuple(path.rsplit(text, 1)) for path in paths if text in path}
        pairs = {(pair[0], pair[1]) for pair in around if len(pair) == 2}
        known = pairs if known is None else known & pairs
    if not known:
        return None
    before, after = min(known)

    def path_of(number: int) -> str | None:
        text = _text(name, number)
        return f"{before}{text}{after}" if text else None

    return path_of


def _text(name: Callable[[int], Any], number: int) -> str:
    try:
        value = name(number)
    except Exception:  # noqa: BLE001  a list of the user's own: whatever it raises, it names nothing
        return ""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return value.removeprefix("./") if isinstance(value, str) else ""


MEMORY_SHARE = 0.5
"""Of the memory that is free at the beginning; the rest is for the training and its workers."""
STRETCH_BYTES = 64 * 1024**2
"""Asked for at a time: a second of a slow disk's work."""
PIECE_BYTES = 1 << 20
"""Read at a time, into memory that is used again."""


class WarmUp:
    """A thread that brings files into the page cache.

    It asks the kernel for one stretch of files after the other and waits until the last of it has
    come: what workers read meanwhile does not queue behind the whole set. The files
    are listed in the thread: names may be many.
    """

    def __init__(self, list_files: Callable[[], Iterable[Path]]) -> None:
        self.list_files = list_files
        self.asked_bytes = 0
        """Of the files that were asked for so far."""
        self.trouble = ""
        """Why nothing is asked for; empty if nothing is in the way."""
        self._thread = threading.Thread(target=self._work, name="flatout-warm-up", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all files were asked for."""
        self._thread.join()

    def _work(self) -> None:
        try:
            sizes = self._sizes()
            needed, room = sum(sizes.values()), MEMORY_SHARE * free_memory_bytes()
            if needed > room:
                self.trouble = (
                    f"the files of the data set take {format_bytes(needed)}, more than "
                    f"{MEMORY_SHARE:.0%} of the free memory ({format_bytes(room)}): they were not "
                    "asked for beforehand"
                )
                return
            self._ask(sizes)
        except Exception as error:  # noqa: BLE001  a data set's own list may raise anything
            self.trouble = f"the files were not all asked for: {type(error).__name__}: {error}"

    def _sizes(self) -> dict[Path, int]:
        sizes = {}
        for path in self.list_files():
            with contextlib.suppress(OSError):  # whoever needs it will say so
                sizes[path] = path.stat().st_size
        return sizes

    def _ask(self, sizes: dict[Path, int]) -> None:
        stretch = 0
        for path, size in sizes.items():
            if not advise(str(path)):
                continue
            self.asked_bytes += size
            stretch += size
            if stretch >= STRETCH_BYTES:
                wait_for(path)
                stretch = 0


def wait_for(path: Path) -> None:
    """Wait until a file is in memory: by reading it, which takes no longer than that.

    Linux calls every page of a file resident for those who neither own it nor may write to it, so
    it could not be asked for a data set that many share.
    """
    piece = bytearray(PIECE_BYTES)
    with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


KOREAN = """
the files of the data set take {size}, more than {share} of the free memory ({room}): they were not
asked for beforehand
    데이터셋의 파일이 {size}로 빈 메모리({room})의 {share}를 넘어 미리 읽지 않았습니다
the files were not all asked for: {error}
    파일을 모두 미리 읽지는 못했습니다: {error}
"""
