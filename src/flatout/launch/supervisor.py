"""The process between flatout and a trial, started by `flatout.launch.trial_process`.

It starts the script, waits for its end, its result, a hang or the death of flatout itself,
then ends everything below it and rolls back what the script wrote. Because it is a process of its
own, that also happens after a kill -9 of flatout. Standard library only, no threads (it forks).
"""

import contextlib
import fcntl
import json
import mmap
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.agent.journal_file import open_claims
from flatout.agent.processes import (
    adopt_orphans,
    await_descendants,
    descendants,
    die_with_parent,
    kill_descendants,
    stat_columns,
    without_cleaners,
)
from flatout.agent.undo_journal import UNRECORDED_SIGN
from flatout.launch import overlay
from flatout.launch.rollback import rollback
from flatout.records.input_files import MAX_OWN_BYTES, parse_json, read_json

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Ends a trial, whoever sends it: some send them to all processes of a user or a container."""
POLL_S = 0.05
"""How often the child is looked at; a trial lasts seconds."""
GRACE_S = 2.0
"""How long the script's main process may live on after a trainer below it wrote its result."""
ENDED_GRACE_S = 30.0
"""The same where the trainer ended on its own: a launcher tells of a failure once it has ended
the other ranks, and an interpreter with torch may need seconds to end on a busy machine."""
HEARTBEAT_BYTES = 8
"""A counter, whether the loop waits for a batch, whether a change could not be noted for undoing,
and the error number of that."""
RESERVE = "reserve"
"""File in the trial's folder that keeps room for its rollback and its ending."""
MAX_STUCK = 4
"""Processes of a hung training that are described: one is enough to see what they wait for."""
STATES = {"R": "running", "S": "sleeping", "D": "blocked in the kernel", "T": "stopped"}
END_OF_INPUT = b"\x04"
MAX_LOG_BYTES = 32 << 20
"""Output of the script that may lie on the disk; only its end is ever looked at."""
KEPT_LOG_BYTES = 1 << 20
"""What is kept of its end when it grows longer."""
MAX_QUESTIONS = 64
"""Reads that are told the input has ended; a script that asks on is a hang."""


def main(argv: list[str]) -> int:
    """Supervise one trial and write its ending; the exit code says only that we worked."""
    spec = read_json(argv[1], MAX_OWN_BYTES)
    spec["environment"] = parse_json(sys.stdin.read())
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING:
        signal.signal(number, _raise_exit)
    folder = Path(spec["folder"])
    started = time.monotonic()
    ending: dict[str, Any] = {}
    try:
        if spec["lock"] is not None:
            open_claims(folder)  # they hold until this process ends
        child, is_overlaid = _start(spec)
        started = time.monotonic()  # another trial may have held the folder until now
        ending = _watch(child, spec, started) | {"is_overlaid": is_overlaid}
    finally:
        for number in ENDING:  # a rollback is not left half done
            signal.signal(number, signal.SIG_IGN)
        ending["orphans"] = len(without_cleaners(descendants(os.getpid())))
        kill_descendants(os.getpid())
        await_descendants(os.getpid())
        (folder / RESERVE).unlink(missing_ok=True)
        undone = rollback(folder)
        ending |= {
            "undone": undone.num_entries + overlay.written_files(folder),
            "kept": undone.differences,
            "wall_s": time.monotonic() - started,
        }
        part = folder / "ending.part"
        part.write_text(json.dumps(ending), encoding="utf-8")
        part.replace(folder / "ending.json")
    return 0


def _raise_exit(*_: Any) -> None:
    raise SystemExit(1)


def _start(spec: Mapping[str, Any]) -> tuple["subprocess.Popen[bytes]", bool]:
    """Start the script, overlaid where the kernel allows it; return it and whether it is."""
    folder, cwd = Path(spec["folder"]), Path(spec["cwd"])
    log = (folder / "log").open("ab")  # appending: what `_bound` cut off leaves no hole
    stdin = _input(spec)

    def prepare() -> None:
        die_with_parent()
        # What is ignored stays so in every program: helpers that a script ends by it would not end.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if wants_overlay:
            overlay.enter_overlay(cwd, folder)
            die_with_parent()  # the request is dropped when credentials change

    for wants_overlay in (True, False) if spec["overlay"] else (False,):
        if spec["overlay"] and not wants_overlay and spec.get("lock") is not None:
            fcntl.flock(spec["lock"], fcntl.LOCK_EX)  # the originals themselves will be moved
        # The journal need not watch a folder that is overlaid; a real path decides there.
        environment = dict(spec["environment"])
        _write_child_spec(spec, is_overlaid=wants_overlay)
        with contextlib.suppress(subprocess.SubprocessError):
            child = subprocess.Popen(
                spec["argv"],
                cwd=cwd,
                env=environment,
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=spec["passed"],
                preexec_fn=prepare,  # safe: this process has one thread
            )
            return child, wants_overlay
    raise RuntimeError("the child could not be prepared")


def _input(spec: Mapping[str, Any]) -> int:
    """Return what the script reads: a terminal, the file that flatout was given, or nothing."""
    if spec.get("terminal"):
        return _terminal(spec["terminal"])
    if spec.get("input"):
        with contextlib.suppress(OSError):
            return os.open(spec["input"], os.O_RDONLY | os.O_CLOEXEC)
    return subprocess.DEVNULL


def _terminal(size: tuple[int, int]) -> int:
    """Return a terminal of this size on which every question finds the end of the input.

    Scripts ask their input for its width to draw progress bars (`stty size`). The user's own
    terminal is not handed over: a script that reads would take the keys meant for flatout.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    os.write(ours, END_OF_INPUT * MAX_QUESTIONS)
    return theirs


def _write_child_spec(spec: Mapping[str, Any], *, is_overlaid: bool) -> None:
    child = dict(spec["child"]) | {"root_pid": os.getpid()}
    if is_overlaid:
        child["not_journaled"] = [*child["not_journaled"], spec["cwd"]]
    Path(spec["child_spec"]).write_text(json.dumps(child), encoding="utf-8")


def _watch(
    child: "subprocess.Popen[bytes]", spec: Mapping[str, Any], started: float
) -> dict[str, Any]:
    """Wait for the first reason to end and return it."""
    folder = Path(spec["folder"])
    beat = _Heartbeat(folder / "heartbeat")
    results = _Results(folder)
    while True:
        code = child.poll()
        _bound(folder / "log")
        if code is not None or beat.unrecorded is not None:
            return _ended(code, beat.unrecorded)
        now = time.monotonic()
        if now - started > spec["limit_s"]:
            return {"why": "limit", "exit_code": None} | _stuck(child.pid, beat)
        if now - max(started, beat.last_change()) > spec["hang_s"]:
            return {"why": "hang", "exit_code": None} | _stuck(child.pid, beat)
        if results.are_old(now) and not beat.moved(now):
            return {"why": "result", "exit_code": None}
        if _parent_is_gone(spec["life_line"]):
            return {"why": "parent gone", "exit_code": None}
        time.sleep(POLL_S)


def _bound(log: Path) -> None:
    """Keep the end of a log that has grown too long: a script may print without end."""
    with contextlib.suppress(FileNotFoundError):
        size = log.stat().st_size
        if size > MAX_LOG_BYTES:
            with log.open("r+b") as file:
                file.seek(size - KEPT_LOG_BYTES)
                end = file.read(KEPT_LOG_BYTES)
                file.truncate(0)
            with log.open("ab") as file:
                file.write(end)


def _ended(code: int | None, unrecorded: int | None) -> dict[str, Any]:
    if unrecorded is None:
        return {"why": "ended", "exit_code": code}
    return {"why": "unrecorded", "exit_code": None, "error": os.strerror(unrecorded)}


def _parent_is_gone(life_line: int) -> bool:
    """Return whether flatout's end of the pipe was closed."""
    readable, _, _ = select.select([life_line], [], [], 0)
    return bool(readable) and os.read(life_line, 1) == b""


def _stuck(pid: int, beat: "_Heartbeat") -> dict[str, Any]:
    """Return whether the loop waits for a batch, and what the processes below it wait in."""
    below = [state for number in descendants(pid)[:MAX_STUCK] if (state := _state_of(number))]
    return {"waits_for_batch": beat.waits_for_batch, "stuck": below}


def _state_of(pid: int) -> str:
    """Return a process's number, state and what the kernel says it waits in."""
    with contextlib.suppress(OSError, IndexError):  # it is gone
        state = stat_columns(pid)[0]
        waits_in = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
        return f"{pid} {STATES.get(state, state)}{' in ' if waits_in else ''}{waits_in}"
    return ""


class _Results:
    """What trainers below the script's main process wrote, and since when."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: set[Path] = set()
        self.ends_at: float | None = None

    def are_old(self, now: float) -> bool:
        """Return whether the main process had its time to end after the first result."""
        for path in set(self.folder.glob("result-*.json")) - self.seen:
            self.seen.add(path)
            is_done = _is_done(path)
            ends_at = now + (GRACE_S if is_done else ENDED_GRACE_S)
            self.ends_at = ends_at if self.ends_at is None else min(self.ends_at, ends_at)
        return self.ends_at is not None and now > self.ends_at


def _is_done(path: Path) -> bool:
    try:
        return bool(read_json(path, MAX_OWN_BYTES)["why"] == "done")
    except (OSError, ValueError, LookupError, TypeError):
        return False


class _Heartbeat:
    """A counter in shared memory that the training process bumps at every hook point event."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(HEARTBEAT_BYTES))
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), HEARTBEAT_BYTES)
        self.value = self.memory[:]
        self.changed_at = 0.0

    @property
    def waits_for_batch(self) -> bool:
        """Whether the loop is waiting for its loader now."""
        return bool(self.memory[1])

    @property
    def unrecorded(self) -> int | None:
        """The error for which some process could not note a change; None without one."""
        return self.memory[UNRECORDED_SIGN + 1] if self.memory[UNRECORDED_SIGN] else None

    def last_change(self) -> float:
        """Return the monotonic time of the last change seen, 0 when there was none."""
        value = self.memory[:]
        if value != self.value:
            self.value, self.changed_at = value, time.monotonic()
        return self.changed_at

    def moved(self, now: float) -> bool:
        """Return whether some trainer was still stepping within the grace time."""
        return now - self.last_change() < GRACE_S
