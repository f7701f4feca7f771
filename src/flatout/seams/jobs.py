"""The folders of running jobs: who owns them, and whether that process still lives.

Standard library only: the flatout process announces, and `flatout watch` looks.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        "boot_id": _boot_id(),
        "pid_namespace": _pid_namespace(),
    }


def find_job(folder: Path) -> dict[str, Any] | None:
    """Return what was announced in a folder; None where it is no job's, or gone."""
    try:
        facts = json.loads((folder / JOB).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(facts, dict) and {"owner", "kind", "workload", "began_at"} <= set(facts)
    return facts if known else None


def lives(facts: Mapping[str, Any]) -> bool:
    """Tell whether the process that owns a job is here, and still the one that announced it."""
    return _is_here(facts) and _runs(facts)


def has_ended(facts: Mapping[str, Any]) -> bool:
    """Tell whether the process that owns a job is gone for certain.

    Folders may lie on a disk that machines or containers share: a number says nothing about a
    process of another one. But what this machine ran before it was started anew has ended.
    """
    if _is_here(facts):
        return not _runs(facts)
    was_restarted = _boot_id() not in (None, facts["boot_id"])
    return was_restarted and facts["host"] == os.uname().nodename


def _is_here(facts: Mapping[str, Any]) -> bool:
    """Tell whether the owner's number counts here; of older announcements that is assumed."""
    if "boot_id" not in facts:
        return True
    if facts["boot_id"] is None:
        return bool(facts["host"] == os.uname().nodename)
    return (facts["boot_id"], facts["pid_namespace"]) == (_boot_id(), _pid_namespace())


def _runs(facts: Mapping[str, Any]) -> bool:
    number, announced = int(facts["owner"]), facts.get("owner_started")
    return is_alive(number) if announced is None else started_ticks(number) == announced


def _boot_id() -> str | None:
    """Return what the kernel calls the time since it started; None where it has no name for it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    """Return what numbers of processes are counted in: each container has its own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; where /proc is hidden, by asking to send it nothing."""
    if started_ticks(os.getpid()) is not None:
        return started_ticks(pid) is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's
    return True


def started_ticks(pid: int) -> int | None:
    """Return when a process started, in ticks since boot: with the number it is unique."""
    try:
        columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(columns[19]) if columns[0] not in "ZX" else None  # starttime, see proc(5)


def forget_ended(root: Path) -> None:
    """Remove the folders of runs whose flatout was killed before it could."""
    for folder in root.glob("run-*"):
        facts = find_job(folder)
        if facts is not None and has_ended(facts):
            shutil.rmtree(folder, ignore_errors=True)
