"""The folders of a trial: its own, made with room to end, and the script's, held and listed."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from flatout.core.errors import UserError
from flatout.seams.folder_lock import WAIT_S, FolderBusyError, hold_folder
from flatout.seams.overlay import can_overlay
from flatout.seams.rollback import stale_copies
from flatout.seams.supervisor import RESERVE

RESERVE_BYTES = 1 << 18
"""Room that is taken before a trial: one that filled the disk is rolled back all the same."""


@contextlib.contextmanager
def hold_working_folder(folder: Path, root: Path, *, is_free: bool) -> Iterator[int | None]:
    """Hold the working folder for one trial; those on overlays do not disturb each other.

    Args:
        folder: of the script.
        root: the cache's folder.
        is_free: whether nothing is held: nothing is undone, or a trial's script started this
            flatout, which is part of that trial then.

    Raises:
        UserError: if another trial does not end, or one that was killed left originals there.
    """
    if is_free:
        yield None
        return
    is_overlaid = can_overlay(folder, root)
    try:
        with hold_folder(folder, root, shared=is_overlaid, limit_s=WAIT_S) as lock:
            if stale_copies(folder):
                raise UserError(
                    f"a trial that was killed left originals moved aside in {folder}; put them "
                    f"back first: flatout restore {folder}"
                )
            yield lock
    except FolderBusyError as error:
        raise UserError(f"{error}; wait for its end, or stop it") from None


def make_trial_folder(root: Path) -> Path:
    """Make a trial's folder, with room for its ending.

    Raises:
        UserError: if the disk is full.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="trial-", dir=root))
        with (folder / RESERVE).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
    except OSError as error:
        raise UserError(
            f"no trial can be run: {root}: {error.strerror}; make room there, or set XDG_CACHE_HOME"
        ) from None
    return folder


MAX_LISTED = 20_000
"""Above this many files the check for changed files is left out: it would cost seconds."""


def list_files(folder: Path) -> dict[str, tuple[int, int]] | None:
    """Return size and time of change of every file below the folder, None when too many."""
    found: dict[str, tuple[int, int]] = {}
    for root, _, files in os.walk(folder):
        if "__pycache__" in root:
            continue
        for name in files:
            with contextlib.suppress(OSError):
                path = f"{root}/{name}"
                stat = os.lstat(path)
                found[path] = (stat.st_size, stat.st_mtime_ns)
        if len(found) > MAX_LISTED:
            return None
    return found


def changed_files(before: Mapping[str, tuple[int, int]] | None, folder: Path) -> tuple[str, ...]:
    """Return the files that differ from an earlier listing; none where there was none."""
    after = list_files(folder)
    if before is None or after is None:
        return ()
    names = {*before, *after}
    return tuple(sorted(n for n in names if before.get(n) != after.get(n)))


def is_supervised(folder: Path) -> bool:
    """Tell whether some process still has this trial on its command line."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in entry.read_bytes():
                return True
    return False


def user_name() -> str:
    """Return the user's name, or the number where there is no name."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
