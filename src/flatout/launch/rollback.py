"""Roll back a trial by its journal, or by the copies of it that are in the user's folders.

`rollback` and `restore` undo entries latest first, so each (`undo`) finds the folder as it was
right after its change. Nothing that the trial did not make is deleted.
"""

import contextlib
import errno
import itertools
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.agent.journal_file import (
    BESIDE,
    CLOCK,
    JOURNAL_NAME,
    Entry,
    boot_id,
    clock_offset_s,
    copies_in,
    entry_of,
    is_at_or_below,
    is_folder,
    is_used,
    line_of,
)

FAILED_NAME = "journal.failed"
"""Entries that could not be undone; the next rollback tries them again."""
MAX_STEP_S = 5.0
"""The wall clock was set if it moved by more than this against the one that no one sets."""
FUTURE_S = 2.0
"""How far clocks of file systems may run ahead of ours."""
KEPT_SUFFIX = ".flatout-kept"
"""Added to what is in the way and may be the user's: a subprocess moved it, unseen by us."""
ORIGINAL_SUFFIX = ".flatout-original"
"""Added to what was there before the trial, where another program has put something newer since."""


Owned = set[int | tuple[int, int]]
"""Inodes, or inodes with the time of the last change in nanoseconds."""


@dataclass(slots=True, kw_only=True)
class JournalPlace:
    """What is known when one entry is undone."""

    owned: Owned | None = None
    """What the trial put at the path after this entry; None where it is not known."""
    until: float = math.inf
    """When the trial's last process may have written; what is newer is another program's."""
    is_clock_sure: bool = True
    """Whether times of files can be compared: the wall clock was not set since the trial began."""
    kept: list[str] = field(default_factory=list)
    """What could not be put back as it was, one line each."""
    spared: set[str] = field(default_factory=set)
    """Paths that another program is known to have written: a new folder with them stays."""

    def is_of_trial(self, status: os.stat_result) -> bool:
        """Return whether the trial made this, as far as can be known."""
        if status.st_mtime > self.until:
            return False
        names = {status.st_ino, (status.st_ino, status.st_mtime_ns)}
        return self.owned is None or bool(self.owned & names)


def undo(entry: Entry, place: JournalPlace) -> bool:
    """Undo one entry. Repeating it is harmless: a rollback may be killed and start again.

    Returns:
        Whether there was anything to undo: it may be gone already, or its folder was new and is.

    Raises:
        OSError: if there is something to restore and that failed: it is still where it was.
    """
    try:
        _UNDO[entry.kind](Path(entry.path), entry, place)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _remove_new(path: Path, _entry: Entry, place: JournalPlace) -> None:
    if is_folder(path) or not place.is_of_trial(path.lstat()):
        place.kept.append(f"{path} was made by another program and stays")
        place.spared.add(str(path))
        return
    path.unlink()


def _remove_folder(path: Path, entry: Entry, place: JournalPlace) -> None:
    """Remove a new folder with what was written in it; C++ and other programs write unseen."""
    _empty(path, entry.number, place)
    if os.path.lexists(path):
        place.kept.append(f"{path} was made by the trial and stays: another program wrote there")


def _empty(path: Path, since: float, place: JournalPlace) -> None:
    """Remove what is not older and not newer than the trial; the rest was moved here, and stays."""
    if not is_folder(path):
        latest = min(place.until, time.time() + FUTURE_S)
        is_new = place.is_clock_sure and since <= path.lstat().st_mtime <= latest
        if is_new and str(path) not in place.spared:
            path.unlink()
        return
    for child in list(path.iterdir()):
        _empty(child, since, place)
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _put_back(path: Path, entry: Entry, place: JournalPlace) -> None:
    aside = Path(entry.other or "")
    aside.lstat()  # or there is nothing to put back
    if is_folder(path):
        _keep(path, place)
    elif os.path.lexists(path) and not place.is_of_trial(path.lstat()):
        aside.rename(_original_name(path, place))
        return
    aside.replace(path)


def _copy_back(path: Path, entry: Entry, _place: JournalPlace) -> None:
    aside = Path(entry.other or "")
    aside.lstat()
    shutil.copy2(aside, path)  # the same file as before: its folder allows no other
    aside.unlink()


def _put_back_tree(path: Path, entry: Entry, place: JournalPlace) -> None:
    aside = Path(entry.other or "")
    aside.lstat()
    if os.path.lexists(path):
        _empty(path, entry.number, place)
    if os.path.lexists(path):
        _keep(path, place)
    shutil.move(aside, path)  # a rename, but for what was copied to another file system


def _restore_link(path: Path, entry: Entry, place: JournalPlace) -> None:
    target, mtime_ns = entry.other or "", int(entry.number)
    if not path.is_symlink() or str(path.readlink()) != target:
        if is_folder(path):
            _keep(path, place)
        elif os.path.lexists(path) and not place.is_of_trial(path.lstat()):
            path = _original_name(path, place)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)


def _rename_back(source: Path, entry: Entry, place: JournalPlace) -> None:
    """Rename back, unless the rename failed in the trial: then the source is still there."""
    renamed = Path(entry.other or "")
    if not os.path.lexists(renamed):  # an earlier try may have kept it
        names = sorted(renamed.parent.glob(f"*{KEPT_SUFFIX}*"))
        ours = [name for name in names if name.name.startswith(renamed.name + KEPT_SUFFIX)]
        renamed = next((name for name in ours if name.lstat().st_ino == entry.number), renamed)
    if os.path.lexists(source):
        if renamed.lstat().st_ino != entry.number:
            return
        _keep(source, place)  # made by another program after the rename
    try:
        source.parent.mkdir(parents=True, exist_ok=True)
        renamed.rename(source)
    except FileNotFoundError:
        raise
    except OSError:
        _keep(renamed, place)  # an earlier entry may delete what has this name
        raise


def _original_name(path: Path, place: JournalPlace) -> Path:
    name = _free_name(path, ORIGINAL_SUFFIX)
    place.spared.update((str(path), str(name)))
    place.kept.append(
        f"{path} was changed by another program and stays; what was there before is {name}"
    )
    return name


def _keep(path: Path, place: JournalPlace) -> None:
    name = _free_name(path, KEPT_SUFFIX)
    path.rename(name)
    place.spared.add(str(name))
    place.kept.append(f"{path} was in the way of what was there before and is {name} now")


def _free_name(path: Path, suffix: str) -> Path:
    names = (path.with_name(f"{path.name}{suffix}{number or ''}") for number in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


_UNDO: dict[str, Callable[[Path, Entry, JournalPlace], Any]] = {
    "new": _remove_new,
    "folder": _remove_folder,
    "moved": _put_back,
    "copied": _copy_back,
    "tree": _put_back_tree,
    "link": _restore_link,
    "renamed": _rename_back,
}
KINDS = frozenset(_UNDO)


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

    Unless the trial ended just now, what is newer than its last sign of life was written by another
    program.
    """
    journal, failed = folder / JOURNAL_NAME, folder / FAILED_NAME
    name = BESIDE + folder.name
    undone = Undone()
    try:
        lines = _lines(failed) + _lines(journal)
        if lines:
            until = math.inf if ended else _newest(folder.iterdir()) + SLACK_S
            copies = [Path(folder, name) for folder in _folders(lines)]
            lines = _with_missed(journal, failed, lines, copies)
            _undo_all(lines, until, undone, _Progress(journal, failed, lines))
    except OSError as error:
        # To go on without the means to do so later could undo an entry twice, after others.
        undone.failed.append(
            f"{journal}: {error.strerror}; what it names and was not put back yet, the next "
            "flatout puts back, or 'flatout restore' in the script's folder"
        )
        return undone
    with contextlib.suppress(OSError):
        journal.unlink()
    return undone


def _with_missed(
    journal: Path, failed: Path, lines: list[bytes], copies: Iterable[Path]
) -> list[bytes]:
    """Return the lines with those that only copies have, as after the power went.

    They are in the journal then, and so are those that failed the last time.
    """
    known, missed = set(lines), []
    for copy in copies:
        with contextlib.suppress(PermissionError):  # its folder is closed: no original came back
            missed += [line for line in _lines(copy) if line not in known]
    if not missed and not failed.exists():
        return lines
    lines = sorted(dict.fromkeys(lines + missed), key=_time_of)
    _write_lines(journal, lines)
    failed.unlink(missing_ok=True)
    return lines


class _Progress:
    """What is noted of a rollback, so that one which was killed goes on where it was."""

    def __init__(self, journal: Path, failed: Path, lines: Sequence[bytes]) -> None:
        self.journal = journal
        self.failed = failed
        self.starts = list(itertools.accumulate(map(len, lines), initial=0))
        self.last_uses = _last_uses([entry_of(line) for line in lines])

    def keep(self, left: Sequence[bytes]) -> None:
        """Note what failed."""
        _write_lines(self.failed, left)

    def cut(self, index: int, failed: Iterable[Entry]) -> None:
        """Cut the journal off before a line that was undone, and remove a copy it was the last of.

        Copies stay in the folders of what failed.
        """
        folder = self.last_uses.get(index)
        if folder is not None and folder not in {str(Path(one.path).parent) for one in failed}:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                Path(folder, BESIDE + self.journal.parent.name).unlink()
        os.truncate(self.journal, self.starts[index])


def _last_uses(entries: Sequence[Entry | None]) -> Mapping[int, str]:
    """Return, by entry, the folder whose copy no earlier entry is in, as it was called then."""
    known: dict[str, int] = {}
    for index, entry in enumerate(entries):
        if entry is not None and entry.kind in KINDS:
            known.setdefault(str(Path(entry.path).parent), index)
        if entry is not None and entry.kind == "renamed" and entry.other:
            for folder in [one for one in known if is_at_or_below(one, entry.path)]:
                known[entry.other + folder[len(entry.path) :]] = known.pop(folder)
    used = set(known.values())
    return {i: str(Path(e.path).parent) for i, e in enumerate(entries) if e and i in used}


def restore(root: Path, was: Path | None = None) -> tuple[Undone, int]:
    """Put back originals below a folder by nothing but the copies of journals there.

    Nothing outside the folder is touched, whatever the copies say. New files of the trial stay.

    `was` is what the folder was called in the trial, as in a container; None for the same name.

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


MAX_SEARCHED = 20_000
"""Files below a folder among which copies of journals are looked for; more would cost seconds."""


def stale_copies(folder: Path) -> list[Path]:
    """Return the copies of journals below a folder whose trial does not run any more."""
    found: list[Path] = []
    searched = 0
    for place, _, names in os.walk(folder):
        if any(name.startswith(BESIDE) for name in names):
            found += [path for path in copies_in(Path(place)) if not is_used(path)]
        searched += len(names)
        if searched > MAX_SEARCHED:
            break
    return found


def _restore_trial(copies: Sequence[Path], root: Path, was: Path | None, undone: Undone) -> None:
    until = _newest(copies) + SLACK_S
    try:
        found = [(line, copy) for copy in copies for line in _lines(copy)]
    except OSError as error:
        undone.failed.append(f"{error.filename}: {error.strerror}")
        return
    found.sort(key=lambda pair: _time_of(pair[0]))
    lines = [line for line, _ in found]

    def moved(entry: Entry) -> Entry | None:
        now = _renamed(entry, root, was)
        return now if _is_confined(now, root, copies[0].name) else None

    left = {_time_of(line) for line in _undo_all(lines, until, undone, None, moved)}
    for copy in copies:
        # Its folder may have another name by now; what was undone is not there a second time.
        if not any(_time_of(line) in left for line, at in found if at == copy):
            for path in (copy, *([] if copy.exists() else _same(copy, root))):
                path.unlink(missing_ok=True)


def _same(copy: Path, root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        if copy.name in names:
            yield Path(folder, copy.name)


def _renamed(entry: Entry, root: Path, was: Path | None) -> Entry:
    """Return the entry with the paths of now."""

    def now(path: str) -> str:
        is_moved = was is not None and is_at_or_below(path, str(was))
        return str(root) + path[len(str(was)) :] if is_moved else path

    has_path = entry.other is not None and entry.kind != "link"
    other = now(entry.other or "") if has_path else entry.other
    return entry._replace(path=now(entry.path), other=other)


def _is_confined(entry: Entry, root: Path, name: str) -> bool:
    """Return whether an entry concerns nothing but folders below `root` with a copy of its journal.

    A copy may have come with a stranger's folder: it must not reach what is next to that.
    """
    paths = [Path(entry.path)]
    if entry.kind in ("moved", "copied", "tree", "renamed"):
        paths.append(Path(entry.other or ""))
    for path in paths:
        folder = Path(os.path.realpath(path.parent))
        if not is_at_or_below(str(folder), str(root)) or path.name in {"", ".", ".."}:
            return False
        # Not `folder.exists()`, which raises for a name that is too long: there is none either.
        if os.path.exists(folder) and not any(x.name == name for x in copies_in(folder)):  # noqa: PTH110
            is_target = entry.kind == "renamed" and str(path) == entry.other
            # No stranger knows an inode. What is not there was undone before.
            if not is_target or (os.path.lexists(path) and path.lstat().st_ino != entry.number):
                return False
    return True


def _undo_all(
    lines: Sequence[bytes],
    until: float,
    undone: Undone,
    progress: _Progress | None,
    change: Callable[[Entry], Entry | None] = lambda entry: entry,
) -> list[bytes]:
    """Undo the lines, latest first; return those that failed, in their order.

    Raises:
        OSError: if the progress cannot be noted.
    """
    entries = [entry_of(line) for line in lines]
    owned = _owned(entries)
    is_clock_sure = not _was_clock_set(entries)
    if not is_clock_sure and until < math.inf:
        until = -math.inf  # whatever is there may be newer
    # For the next try: what failed, and what has to be known for it.
    failed: dict[int, Entry] = {}
    known = {i: entry for i, entry in enumerate(entries) if entry and entry.kind not in KINDS}
    for index in reversed(range(len(lines))):
        entry = entries[index]
        if entry is None:
            undone.kept += _unreadable(lines[index])
        elif entry.kind in KINDS:
            changed = change(entry)
            place = JournalPlace(
                owned=owned.get(index),
                until=until,
                is_clock_sure=is_clock_sure,
                kept=undone.kept,
                spared=undone.spared,
            )
            if changed is None:
                undone.failed.append(
                    f"{entry.path} is not in the folders of the trial, and was left alone"
                )
                failed[index] = entry
            elif not _undo_one(changed, place, undone, is_expected=bool(failed)):
                failed[index] = entry
            elif entry.kind == "renamed" and failed:
                failed = {i: _carried(one, entry) for i, one in failed.items()}
                known |= {i: _carried(one, entry) for i, one in known.items() if i > index}
        if progress is not None:
            if index in failed or (failed and entry and entry.kind == "renamed"):
                progress.keep(_lines_of(known | failed))
            progress.cut(index, failed.values())
    return _lines_of(known | failed) if failed else []


def _unreadable(line: bytes) -> list[str]:
    """Return what to say of a line; of half a one nothing: its process ended before the change."""
    is_whole = line.strip() and line.endswith(b"\n")
    return [f"a line of the journal cannot be read: {line[:60]!r}"] if is_whole else []


def _lines_of(entries: Mapping[int, Entry]) -> list[bytes]:
    return [line_of(entries[number]) for number in sorted(entries)]


def _carried(entry: Entry, undone: Entry) -> Entry:
    """Return an entry with the names that undoing an earlier rename gave its paths."""
    new = undone.other or ""

    def now(path: str) -> str:
        return undone.path + path[len(new) :] if is_at_or_below(path, new) else path

    return entry._replace(path=now(entry.path), other=entry.other and now(entry.other))


def _was_clock_set(entries: Sequence[Entry | None]) -> bool:
    """Return whether the wall clock was set since one of these, as far as this boot can know."""
    boot, offset_s = boot_id(), clock_offset_s()
    return boot is not None and any(
        entry.other == boot and abs(entry.number - offset_s) > MAX_STEP_S
        for entry in entries
        if entry is not None and entry.kind == CLOCK
    )


def _undo_one(entry: Entry, place: JournalPlace, undone: Undone, *, is_expected: bool) -> bool:
    """Return whether an entry needs no other try.

    Where something failed before (`is_expected`), what is not there may come with it.
    """
    try:
        found = undo(entry, place)
    except (OSError, ValueError, OverflowError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        where = f"; what was there before is {entry.other}" if entry.other else ""
        undone.failed.append(f"{entry.path} could not be put back: {said}{where}")
        return False
    is_left = not found or (entry.kind == "folder" and os.path.lexists(entry.path))
    if is_left and is_expected:
        return False
    undone.num_entries += 1
    return True


def _owned(entries: Sequence[Entry | None]) -> Mapping[int, Owned]:
    """Return, by entry, the inodes that the trial put at its path until the next entry on it."""
    latest: dict[str, int] = {}
    owned: dict[int, Owned] = {}
    folders: set[str] = set()
    """Of the paths: to rename a file looks at no other."""

    def note(path: str, index: int) -> None:
        latest[path] = index
        while (path := path.rpartition("/")[0]) not in folders:
            folders.add(path)

    for index, entry in enumerate(entries):
        if entry is None:
            continue
        if entry.kind == "made" and entry.path in latest:
            owned.setdefault(latest[entry.path], set()).add(int(entry.number))
        elif entry.kind == "gone" and entry.path in latest:
            # The process may have ended before it removed that: then it is as it was.
            owned[latest[entry.path]] = {(int(entry.number), int(entry.other or 0))}
        elif entry.kind == "renamed" and entry.other is not None:
            paths = latest if entry.path in folders else {entry.path} & latest.keys()
            for path in [path for path in paths if is_at_or_below(path, entry.path)]:
                note(entry.other + path[len(entry.path) :], latest.pop(path))
        elif entry.kind in KINDS:
            note(entry.path, index)
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


def _lines(path: Path) -> list[bytes]:
    """Return a journal's lines; none where there is no such file.

    Raises:
        OSError: if it is there and cannot be read: to take it for empty would leave originals
            under names that no one knows.
    """
    try:
        return path.read_bytes().splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _write_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Replace a journal's lines, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _time_of(line: bytes) -> int:
    entry = entry_of(line)
    return 0 if entry is None else entry.time


def _newest(paths: Iterable[Path]) -> float:
    times = [0.0]
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)
