"""Which file lies behind a sample: seen by watching what is opened, then read off the data set.

A few samples are made in a forked copy of the process while every `open` is noted. Where one list
of the data set names those files at their places, it names the files of all other samples too.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flatout.data.forked import ForkedError, in_fork

WATCHED = 6
"""Samples whose files are looked at: a list that fits six places by chance names files anyway."""
LIMIT_S = 20.0
MAX_DEPTH = 3
"""Data sets wrapped in one another that are looked into, such as a subset of a subset."""
MAX_PARTS = 4
"""Items of a pair of path and label, and the like, that are tried."""

FindFile = Callable[[int], str | None]


def find_files(dataset: Any) -> FindFile | None:
    """Return what tells the file of a sample by its number; None where no list names them."""
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

    The name may be the whole path, or what stands between a folder and an ending.
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
