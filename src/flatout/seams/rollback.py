"""Roll back a trial by its journal, or by the copies of it that lie in the user's folders."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flatout.seams.journal_file import (
    BESIDE,
    FAILED_NAME,
    JOURNAL_NAME,
    Entry,
    copies_in,
    entry_of,
    is_used,
    write_lines,
)
from flatout.seams.journal_paths import is_at_or_below
from flatout.seams.undo import KINDS, Owned, Place, undo

SLACK_S = 60.0
"""How long after its last note a trial that was killed may have written to a file it had open."""


@dataclass(slots=True, kw_only=True)
class Undone:
    """What a rollback did."""

    num_entries: int = 0
    kept: list[str] = field(default_factory=list)
    """What differs from before the trial, one line each."""
    spared: set[str] = field(default_factory=set)
    """Paths of that."""
    failed: list[str] = field(default_factory=list)
    """What could not be put back; its journal stays for the next try."""

    @property
    def differences(self) -> tuple[str, ...]:
        """Everything that is not as it was."""
        return (*self.kept, *self.failed)


def rollback(folder: Path, *, ended: bool = True) -> Undone:
    """Undo everything that the journal in `folder` lists, latest first.

    Repeating it is harmless, also after it was killed: what is undone is cut off the journal. (To
    undo "a file is new" twice would delete what was renamed back to that name in between.)

    Args:
        folder: of the trial.
        ended: whether the trial ended just now; else what is newer than its last sign of life was
            written by another program.
    """
    journal, failed = folder / JOURNAL_NAME, folder / FAILED_NAME
    undone = Undone()
    lines = _lines(failed) + _lines(journal)
    if not lines:
        with contextlib.suppress(OSError):
            journal.unlink()
        return undone
    until = math.inf if ended else _last_sign(folder) + SLACK_S
    name = BESIDE + folder.name
    places = [Path(folder, name) for folder in _folders(lines)]
    copies = [path for path in places if os.path.lexists(path)]
    known = set(lines)
    missed = [line for copy in copies for line in _lines(copy) if line not in known]
    if missed or failed.exists():  # the power went, or something failed the last time
        lines = sorted(lines + missed, key=_time_of)
        with contextlib.suppress(OSError):  # on a full disk without the means to go on later
            write_lines(journal, lines)
            failed.unlink(missing_ok=True)
    cut = _cut_from(journal, lines)
    left = _undo_all(lines, until, undone, lambda index: cut(index))
    if left:
        with contextlib.suppress(OSError):
            write_lines(failed, left)
    needed = {Path(one, name) for one in _folders(left)}
    for copy in set(places) - needed:  # now also where folders have their old names again
        with contextlib.suppress(OSError):
            copy.unlink()
    journal.unlink(missing_ok=True)
    return undone


def restore(root: Path, was: Path | None = None) -> tuple[Undone, int]:
    """Put back originals below a folder by nothing but the copies of journals there.

    Nothing outside the folder is touched, whatever the copies say. New files of the trial stay.

    Args:
        root: the folder.
        was: what the folder was called in the trial, as in a container; None for the same name.

    Returns:
        What was done, and how many copies were left alone because their trial still runs.
    """
    root = root.resolve()
    undone = Undone()
    trials: dict[str, list[Path]] = {}
    num_used = 0
    for folder, _, _ in os.walk(root):
        for copy in copies_in(Path(folder)):
            if is_used(copy):
                num_used += 1
            else:
                trials.setdefault(copy.name, []).append(copy)
    for copies in sorted(trials.values(), key=_newest, reverse=True):
        _restore_trial(copies, root, was, undone)
    return undone, num_used


def stale_copies(folder: Path) -> list[Path]:
    """Return the copies of journals in a folder whose trial does not run any more."""
    return [path for path in copies_in(folder) if not is_used(path)]


def _restore_trial(copies: Sequence[Path], root: Path, was: Path | None, undone: Undone) -> None:
    until = _newest(copies) + SLACK_S
    found = [(line, copy) for copy in copies for line in _lines(copy)]
    found.sort(key=lambda pair: _time_of(pair[0]))
    lines = [line for line, _ in found]

    def moved(entry: Entry) -> Entry | None:
        return _confined(entry, root, was)

    left = set(_undo_all(lines, until, undone, lambda _: None, moved))
    for copy in copies:
        # Its folder may have another name by now; what was undone is not there a second time.
        if not any(line in left for line, at in found if at == copy):
            for path in (copy, *([] if copy.exists() else _same(copy, root))):
                path.unlink(missing_ok=True)


def _same(copy: Path, root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        if copy.name in names:
            yield Path(folder, copy.name)


def _confined(entry: Entry, root: Path, was: Path | None) -> Entry | None:
    """Return the entry with the paths of now; None where one of them is not below the folder."""
    paths = [entry.path] if entry.kind == "link" else [entry.path, entry.other or entry.path]
    if was is not None:
        paths = [
            str(root) + p[len(str(was)) :] if is_at_or_below(p, str(was)) else p for p in paths
        ]
    for path in paths:
        folder = os.path.realpath(Path(path).parent)
        if not is_at_or_below(folder, str(root)) or Path(path).name in {"", ".", ".."}:
            return None
    other = entry.other if entry.kind == "link" else paths[1] if entry.other else None
    return entry._replace(path=paths[0], other=other)


def _undo_all(
    lines: Sequence[bytes],
    until: float,
    undone: Undone,
    cut: Callable[[int], None],
    change: Callable[[Entry], Entry | None] = lambda entry: entry,
) -> list[bytes]:
    """Undo the lines, latest first; return those that failed, in their order."""
    entries = [entry_of(line) for line in lines]
    owned = _owned(entries)
    left = []
    for index in reversed(range(len(lines))):
        entry = entries[index]
        if entry is None:
            # Half a line is of a change that was not done: its process ended before.
            if lines[index].strip() and lines[index].endswith(b"\n"):
                undone.kept.append(f"a line of the journal cannot be read: {lines[index][:60]!r}")
        elif entry.kind in KINDS:
            changed = change(entry)
            if changed is None:
                undone.failed.append(f"{entry.path} is outside the folder and was left alone")
                left.append(lines[index])
            elif not _undo_one(changed, owned.get(index), until, undone):
                left.append(lines[index])
        cut(index)
    return left[::-1]


def _undo_one(entry: Entry, owned: Owned | None, until: float, undone: Undone) -> bool:
    place = Place(owned=owned, until=until, kept=undone.kept, spared=undone.spared)
    try:
        undo(entry, place)
    except (OSError, ValueError, OverflowError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        where = f"; what was there before is {entry.other}" if entry.other else ""
        undone.failed.append(f"{entry.path} could not be put back: {said}{where}")
        return False
    undone.num_entries += 1
    return True


def _owned(entries: Sequence[Entry | None]) -> Mapping[int, Owned]:
    """Return, by entry, the inodes that the trial put at its path until the next entry on it."""
    latest: dict[str, int] = {}
    owned: dict[int, Owned] = {}
    for index, entry in enumerate(entries):
        if entry is None:
            continue
        if entry.kind == "made" and entry.path in latest:
            owned.setdefault(latest[entry.path], set()).add(int(entry.number))
        elif entry.kind == "gone" and entry.path in latest:
            # The process may have ended before it removed that: then it is as it was.
            owned[latest[entry.path]] = {(int(entry.number), int(entry.other or 0))}
        elif entry.kind == "renamed" and entry.other is not None:
            for path in [path for path in latest if is_at_or_below(path, entry.path)]:
                latest[entry.other + path[len(entry.path) :]] = latest.pop(path)
        elif entry.kind in KINDS:
            latest[entry.path] = index
    return owned


def _folders(lines: Sequence[bytes]) -> set[str]:
    """Return the folders with originals, by each name that a rename gave them or took from them."""
    entries = [entry for line in lines if (entry := entry_of(line))]
    folders = {str(Path(entry.path).parent) for entry in entries}
    for entry in reversed(entries):
        if entry.kind == "renamed" and entry.other:
            now = [path for path in folders if is_at_or_below(path, entry.other)]
            folders.update(entry.path + path[len(entry.other) :] for path in now)
    return folders


def _cut_from(journal: Path, lines: Sequence[bytes]) -> Callable[[int], None]:
    """Return what cuts a journal off before a line."""
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def cut(index: int) -> None:
        with contextlib.suppress(OSError):
            os.truncate(journal, starts[index])

    return cut


def _lines(path: Path) -> list[bytes]:
    with contextlib.suppress(OSError):
        return path.read_bytes().splitlines(keepends=True)
    return []


def _time_of(line: bytes) -> int:
    entry = entry_of(line)
    return 0 if entry is None else entry.time


def _last_sign(folder: Path) -> float:
    times = [0.0]
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _newest(copies: Sequence[Path]) -> float:
    times = [0.0]
    for copy in copies:
        with contextlib.suppress(OSError):
            times.append(copy.stat().st_mtime)
    return max(times)
