"""Files that flatout writes: whole or not at all; and how another Python finds this flatout."""

import contextlib
import difflib
import errno
import operator
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from flatout.records.errors import UserError

BYTES = ("utf-8", "surrogateescape")
"""Encoding and errors of a text that may hold bytes of another encoding, as Python's paths do."""
NO_END = b"\n\\ No newline at end of file\n"
STANDARD = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
PRIVATE = 0o700
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
STDOUT = Path("-")
"""Means standard output where the name of a file is expected."""
SOURCE = Path(__file__).parent.parent.parent
"""Where flatout is: often site-packages, so it is never put in front of the standard library."""
BOOT = SOURCE / "flatout" / "agent" / "boot"
RUN_MODULE = (
    "import sys, os; sys.path[:] = [p for p in sys.path if p not in ('', os.getcwd())]; "
    "import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""What `python -m` does, but for the current folder in front of everything on `sys.path`: a
`json.py` there would run. Python 3.10 has no `-P`; `sys` and `os` are loaded before the path is
extended."""


def private_folder(path: Path) -> Path:
    """Return a folder of this user's that no one else can read or write, made where it is missing.

    What is in it is loaded as code or put back over the user's files, so a folder that someone
    else made, linked to or could write into is refused: what is in it may be theirs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=PRIVATE)
    remedy = "check what is in it and remove it, or set XDG_CACHE_HOME to a folder of your own"
    # No link is followed, and no one else can put another folder in the place of one of our own.
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{path} is a link or no folder: {remedy}")
    if found.st_uid != os.geteuid():
        raise UserError(f"{path} belongs to another user: {remedy}")
    if found.st_mode & OTHERS_WRITE:
        raise UserError(f"other users can write to {path}: {remedy}")
    if stat.S_IMODE(found.st_mode) != PRIVATE:
        path.chmod(PRIVATE)
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


def replace_text(path: Path, text: str) -> None:
    """Write alongside the target and rename, so that a full disk leaves the old file as it was.

    A link stays one, and a device, a pipe or an open descriptor (`/dev/stdout`) is written into:
    to rename over it would take it, or what was written there before, away from everybody.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    number = find_descriptor(path)
    if number is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(os.dup(number), "wb") as stream:
            stream.write(text.encode(*BYTES))
        return
    if is_stream(path):
        path.write_bytes(text.encode(*BYTES))
        return
    path = linked(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A temporary file is private, what was asked for is not.
    mask = os.umask(0)
    os.umask(mask)
    _replace(path, text.encode(*BYTES), lambda draft: draft.chmod(0o666 & ~mask))


def unified_diff(path: Path, before: bytes, after: bytes) -> str:
    """Return the change of a file as `patch -p1` and `git apply` take it, whatever its encoding.

    What is no UTF-8 is in surrogates, which `BYTES` turns back. A link is named by its file: the
    programs write through none.
    """
    with contextlib.suppress(ValueError):
        path = linked(path).relative_to(Path.cwd()) if path.is_symlink() else path
    name = os.fsencode(str(path).lstrip("/"))
    # A name with a space ends at the tab behind it. Lines end as `patch` sees them: a form feed or
    # a separator of Unicode ends none.
    end = b"\t" if b" " in name else b""
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        BytesIO(before).readlines(),
        BytesIO(after).readlines(),
        b"a/" + name + end,
        b"b/" + name + end,
    )
    whole = (line if line.endswith(b"\n") else line + NO_END for line in lines)
    return b"".join(whole).decode(*BYTES)


def rewrite(path: Path, before: bytes, after: bytes) -> None:
    """Replace what a user's file holds; its mode, what else belongs to it, and a link to it stay.

    It is refused where it would not be the same file afterwards, or no longer holds `before`.
    """
    target = linked(path)
    status = target.stat()
    if not status.st_mode & 0o222 or not os.access(target, os.W_OK):
        raise UserError(f"{path} is write-protected and was left as it is")
    if status.st_nlink > 1:
        raise UserError(f"{path} has a second name (a hard link) and was left as it is")
    if status.st_uid != os.geteuid():
        raise UserError(f"{path} belongs to another user and was left as it is")

    def finish(draft: Path) -> None:
        shutil.copystat(target, draft)  # access control lists, too
        os.utime(draft)
        if target.read_bytes() != before:
            raise UserError(f"{path} was changed meanwhile and was left as it is")

    _replace(target, after, finish)


def _replace(path: Path, data: bytes, finish: Callable[[Path], None]) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)  # or the power may go between the name and the content
        finish(draft)
        draft.replace(path)
    except BaseException:  # Ctrl-C in mid-write too: no draft is left in the user's folder
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def is_stream(path: Path) -> bool:
    """Return whether a path leads to a device, a pipe or a socket rather than to a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


def find_descriptor(path: Path) -> int | None:
    """Return the open descriptor that a path such as `/dev/stdout` names, None for other paths."""
    is_numbered = str(path.parent) in ("/dev/fd", "/proc/self/fd") and path.name.isdecimal()
    return int(path.name) if is_numbered else STANDARD.get(str(path))


def linked(path: Path) -> Path:
    """Return where a link leads, and any other path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def plain(value: Any) -> int | str:
    """Return what JSON has no form for: other libraries' whole numbers as such, the rest as text.

    Sizes of layers are often NumPy's, as those of an environment's action space are.

    >>> plain(Path("a")), plain(True)
    ('a', 1)
    """
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return str(value)


def module_command(python: str, module: str, *words: str) -> list[str]:
    """Return the argv that runs a module of ours, and nothing out of the current folder."""
    return [python, "-c", RUN_MODULE, module, *words]


def with_boot(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a Python that finds flatout, and all else as it would without.

    >>> with_boot({"PYTHONPATH": "mine"})["PYTHONPATH"] == f"{BOOT}{os.pathsep}mine"
    True
    """
    search = [str(BOOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(search)}
