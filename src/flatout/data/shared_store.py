"""One store for all ranks of a training on a host: each would otherwise keep the same files.

Whoever comes first makes it and tells, in a small file, where its memory is; the others open that
memory through /proc. A launcher's ranks have one parent process: that is how they know each other.
Nothing is left but that file once the last process is gone, and the next training removes it.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flatout.core.input_files import read_json
from flatout.data.room import local_ranks
from flatout.data.store import Store
from flatout.seams.process import scratch_root

PROC = Path("/proc")
STARTED = 21
"""Place of the start time in /proc/PID/stat, counted from 0 and without the name; proc(5)."""
MEMORY = "flatout-store"
"""In the name of the memory that a store lies in."""


def shared_store(name: str, make: Callable[[int], Store]) -> Store:
    """Return the store that this host's ranks have in common.

    Args:
        name: What is kept there; the same in all ranks.
        make: Makes a store, given the number of ranks that share the memory with others of their
            own: 1 where this one is for all.
    """
    ranks = local_ranks()
    if ranks == 1:
        return make(1)
    try:
        return _found_or_made(name, make)
    except OSError:
        return make(ranks)


def _found_or_made(name: str, make: Callable[[int], Store]) -> Store:
    folder = scratch_root() / "stores"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_job()}-{name}.json"
    with _alone(folder):
        state = _read(path)
        if state is not None:
            store = Store.__new__(Store)
            store.__setstate__(state)
            return store
        _clear(folder)
        made = make(1)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(made.__getstate__()), encoding="utf-8")
        unfinished.replace(path)
        return made


def _job() -> str:
    """Return what the ranks of one launcher have in common: their parent, and when it began."""
    parent = os.getppid()
    return f"{parent}-{_started(parent)}"


def _started(pid: int) -> str:
    facts = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    return facts.rpartition(")")[2].split()[STARTED - 2]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep the other ranks out; the kernel lets go when one is killed."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> dict[str, Any] | None:
    """Return where a store is, None where none is told or its maker is gone."""
    try:
        state: dict[str, Any] = read_json(path)
        memory = (PROC / str(state["pid"]) / "fd" / str(state["descriptor"])).readlink().name
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if MEMORY in memory else None


def _clear(folder: Path) -> None:
    """Remove what earlier trainings left."""
    for path in folder.glob("*.json"):
        if _read(path) is None:
            with suppress(OSError):
                path.unlink()
