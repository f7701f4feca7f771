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
        "owner": os.getpid(),
        "owner_started": started_ticks(os.getpid()),
        "kind": kind,
        "workload": workload,
        "began_at": time.time(),
    }
    (folder / JOB).write_text(json.dumps(facts), encoding="utf-8")


def find_job(folder: Path) -> dict[str, Any] | None:
    """Return what was announced in a folder; None where it is no job's, or gone."""
    try:
        facts = json.loads((folder / JOB).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(facts, dict) and {"owner", "kind", "workload", "began_at"} <= set(facts)
    return facts if known else None


def lives(facts: Mapping[str, Any]) -> bool:
    """Tell whether the process that owns a job is still the one that announced it."""
    owner, announced = int(facts["owner"]), facts.get("owner_started")
    return is_alive(owner) if announced is None else started_ticks(owner) == announced


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
        if facts is not None and not lives(facts):
            shutil.rmtree(folder, ignore_errors=True)
