"""The folders of a trial: its own, made with room to end, and the script's, held and listed.

Standard library only. `announce` says who owns a running job, `lives` whether that process still
does: the flatout process announces, `flatout watch` looks.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flatout.agent.journal_file import boot_id
from flatout.agent.processes import stat_columns
from flatout.launch.folder_lock import WAIT_S, FolderBusyError, hold_folder
from flatout.launch.overlay import can_overlay
from flatout.launch.rollback import stale_copies
from flatout.launch.supervisor import RESERVE
from flatout.records.errors import UserError
from flatout.records.input_files import read_json

JOB = "job.json"
FOLDERS = ("run-*", "trial-*")
"""Where jobs are announced, below the scratch root."""


def announce(folder: Path, kind: str, workload: str) -> None:
    """Say in a job's folder who owns it."""
    facts = {
        **owner(),
        "kind": kind,
        "workload": workload,
        "began_at": time.time(),
    }
    (folder / JOB).write_text(json.dumps(facts), encoding="utf-8")


def owner() -> dict[str, Any]:
    """Return what tells this process from every other one, on other machines too."""
    return {
        "owner": os.getpid(),
        "owner_started": started_ticks(os.getpid()),
        "host": os.uname().nodename,
        "boot_id": boot_id(),
        "pid_namespace": _pid_namespace(),
    }


def find_job(folder: Path) -> dict[str, Any] | None:
    """Return what was announced in a folder; None where it is no job's, or gone."""
    facts = find_owner(folder / JOB)
    if facts is None or not {"kind", "workload", "began_at"} <= set(facts):
        return None
    is_sound = isinstance(facts["kind"], str) and isinstance(facts["workload"], str)
    return facts if is_sound and type(facts["began_at"]) in (int, float) else None


def find_owner(path: Path) -> dict[str, Any] | None:
    """Return a file's facts if they name the process they belong to (`owner`), else None."""
    try:
        facts = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(facts, dict) or type(facts.get("owner")) is not int:
        return None
    return facts


def lives(facts: Mapping[str, Any]) -> bool:
    """Return whether the process that owns a job is here, and still the one that announced it."""
    return _is_here(facts) and _runs(facts)


def has_ended(facts: Mapping[str, Any]) -> bool:
    """Return whether the process that owns a job is gone for certain.

    Folders may be on a disk that machines or containers share: a number says nothing about a
    process of another one. But what this machine ran before it was started again has ended.
    """
    if _is_here(facts):
        return not _runs(facts)
    was_restarted = boot_id() not in (None, facts["boot_id"])
    return was_restarted and facts.get("host") == os.uname().nodename


def _is_here(facts: Mapping[str, Any]) -> bool:
    """Return whether the owner's number counts here; of older announcements that is assumed."""
    if "boot_id" not in facts:
        return True
    if facts["boot_id"] is None:
        return bool(facts.get("host") == os.uname().nodename)
    return (facts["boot_id"], facts.get("pid_namespace")) == (boot_id(), _pid_namespace())


def _runs(facts: Mapping[str, Any]) -> bool:
    number, announced = facts["owner"], facts.get("owner_started")
    return is_alive(number) if announced is None else started_ticks(number) == announced


def _pid_namespace() -> str | None:
    """Return what numbers of processes are counted in: each container has its own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def is_alive(pid: int) -> bool:
    """Return whether a process runs; where /proc is hidden, by asking to send it nothing."""
    if started_ticks(os.getpid()) is not None:
        return started_ticks(pid) is not None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # someone else's
    return True


def started_ticks(pid: int) -> int | None:
    """Return when a process started, in ticks since boot: with the number it is unique."""
    columns = stat_columns(pid)
    runs = columns and columns[0] not in "ZX"
    return int(columns[19]) if runs else None  # starttime, see proc(5)


def forget_ended(root: Path) -> None:
    """Remove the folders of runs, and of their ranks, whose flatout was killed before it could."""
    for folder in (*root.glob("run-*"), *root.glob("ranks-*")):
        facts = find_job(folder)
        if facts is not None and has_ended(facts):
            shutil.rmtree(folder, ignore_errors=True)


RESERVE_BYTES = 1 << 18
"""Room that is taken before a trial: one that filled the disk is rolled back all the same."""


@contextlib.contextmanager
def hold_working_folder(folder: Path, root: Path, *, is_free: bool) -> Iterator[int | None]:
    """Hold the working folder for one trial; those on overlays do not disturb each other.

    Nothing is held where it is free: nothing is undone, or a trial's script started this flatout,
    which is part of that trial then.
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
    """Make a trial's folder, with room for its ending."""
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
    """Return whether some process still has this trial on its command line."""
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
