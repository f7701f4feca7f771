"""Undo journal: whatever the script writes is rolled back when its trial is over.

No path is redirected (that breaks scripts that read back what they wrote, and C++ compilers that
look for headers). An audit hook sees every open, mkdir, rename and remove *before* it happens,
notes it and moves the original aside; the supervisor rolls back, also after a crash.
"""

import functools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

JOURNAL_NAME = "journal"
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def install(folder: Path, skip: Sequence[str]) -> None:
    """Journal this process's writes into `folder`, those below the paths in `skip` left out."""
    file = os.open(folder / JOURNAL_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.addaudithook(_Hook(file, (*skip, str(folder))))


def announce_torch_save() -> None:
    """Make `torch.save(path)` visible to the journal: it opens its file in C++."""
    import torch

    save = torch.save

    @functools.wraps(save)
    def announced(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            sys.audit("open", os.fspath(f), "w", 0)
        return save(obj, f, *args, **kwargs)

    torch.save = announced


def rollback(folder: Path) -> int:
    """Undo everything that the journal in `folder` lists, latest first; return how many entries.

    Repeating it is harmless.
    """
    journal = folder / JOURNAL_NAME
    if not journal.exists():
        return 0
    text = journal.read_text(encoding="utf-8", errors="surrogateescape")
    # Without its line's end, the last entry is of a process that was killed in mid-write.
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    for kind, path, aside in reversed(rows):
        _undo(kind, Path(path), aside)
    journal.unlink()
    return len(rows)


def _undo(kind: str, path: Path, aside: str | None) -> None:
    try:
        if kind == "folder":
            shutil.rmtree(path, ignore_errors=True)
        elif kind == "new":
            path.unlink()
        elif aside is not None and Path(aside).exists():
            Path(aside).replace(path)
    except OSError:
        pass  # already gone, or its folder was new and is gone: nothing left to restore


class _Hook:
    """The audit hook. One per process; forked children inherit it and append to one journal."""

    def __init__(self, file: int, skip: tuple[str, ...]) -> None:
        self.file = file
        self.skip = tuple(os.path.realpath(path) for path in skip if path)
        self.seen: set[str] = set()
        self.is_busy = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _EVENTS or self.is_busy:
            return
        self.is_busy = True
        try:
            for path, keeps_content in _written(event, args):
                self._guard(path, keeps_content=keeps_content)
        except (OSError, TypeError, ValueError):
            pass  # never end the training: the trial reports changed files as its own defect
        finally:
            self.is_busy = False

    def _guard(self, raw: Any, *, keeps_content: bool | None) -> None:
        if not isinstance(raw, str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(raw))
        if path in self.seen or self._is_skipped(path):
            return
        self.seen.add(path)
        if keeps_content is None:
            if not os.path.lexists(path):
                self._note("folder", path, None)
            return
        if not os.path.lexists(path):
            self._note("new", path, None)
        elif Path(path).is_file():
            self._move_aside(path, keeps_content=keeps_content)

    def _move_aside(self, path: str, *, keeps_content: bool) -> None:
        """Rename the original (same file system, so at once) and copy back where it is needed."""
        original = Path(path)
        name = f".{original.name}.flatout-{os.getpid()}-{len(self.seen)}"
        aside = original.with_name(name)
        self._note("moved", path, str(aside))
        original.rename(aside)
        if keeps_content:
            shutil.copy2(aside, path)

    def _is_skipped(self, path: str) -> bool:
        return any(path == root or path.startswith(root + os.sep) for root in self.skip)

    def _note(self, kind: str, path: str, aside: str | None) -> None:
        line = json.dumps([kind, path, aside]) + "\n"
        os.write(self.file, line.encode("utf-8", errors="surrogateescape"))


_EVENTS = frozenset({"open", "os.remove", "os.truncate", "os.rename", "os.mkdir"})


def _written(event: str, args: tuple[Any, ...]) -> list[tuple[Any, bool | None]]:
    """Return the paths an event is about to change: (path, old content still needed | folder)."""
    if event == "open":
        path, mode, flags = args
        if isinstance(mode, str):
            return [(path, "w" not in mode)] if set(mode) & set("wax+") else []
        return [(path, True)] if flags & _WRITING_FLAGS else []
    if event == "os.mkdir":
        return [(args[0], None)]
    if event == "os.rename":
        return [(args[1], False), (args[0], True)]
    return [(args[0], True)]
