"""One stage in a process of its own: what hangs or dies there takes nothing else along.

A product that reads beyond its operands leaves a CUDA context that fails at every further call, and
a hung driver call hears no alarm: neither may cost the other stages their results. The stage writes
what it has so far, and in the end how it went, into a file; what it prints is passed on.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.stages import Stage, outcome

GRACE_S = 20.0
"""After its time is up: to hear the alarm, end what runs and write; then it is killed. A trial that
runs is given fifteen seconds to end and to be rolled back (`hook points.process`)."""
LAST_S = 3.0
"""From being asked to end to being killed; the same again for what it printed to arrive."""
ROOT = Path(__file__).parents[1]
MOST_SAID = 2_000
"""Characters of what it printed last that are kept of a stage that died."""


def play_inside(stage: Stage, seconds: float, path: Path) -> None:
    """Do the work of a stage in this process, and write how it went.

    Of one that fails, what it noted under way stays the result.
    """
    found = outcome(stage, seconds)
    if found["status"] != "done":
        with contextlib.suppress(OSError, ValueError, KeyError):
            noted = json.loads(path.read_text(encoding="utf-8"))
            found["result"] = noted["result"]
    write(path, found)


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Write a JSON file, under its name only when it is whole."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, default=str), encoding="utf-8")
    part.replace(path)


def note_to(path: Path) -> Callable[[Mapping[str, Any]], None]:
    """Return what keeps the result so far, for the case that nothing more comes."""

    def note(result: Mapping[str, Any]) -> None:
        write(path, {"status": "failed", "why": "it ended under way", "result": dict(result)})

    return note


def play_outside(
    command: Sequence[str],
    seconds: float,
    path: Path,
    say: Callable[[str], None],
    *,
    grace_s: float = GRACE_S,
) -> dict[str, Any]:
    """Run a stage's process and return how it went, whatever becomes of the process.

    It keeps to the stage's time on its own, may take `grace_s` more, and writes the outcome to
    `path`.
    """
    path.unlink(missing_ok=True)
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
    )
    said: list[str] = []
    reader = threading.Thread(target=_pass_on, args=(process, said, say), daemon=True)
    reader.start()
    is_late = not _wait(process, seconds + grace_s)
    if is_late:
        _end(process)
    reader.join(LAST_S)
    found: dict[str, Any] = {"status": "failed"}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
    if found["status"] == "failed" and (is_late or process.returncode != 0):
        found["why"] = _why(process, seconds, is_late=is_late)
        found["traceback"] = "\n".join(said)[-MOST_SAID:]
    return found


def _pass_on(process: "subprocess.Popen[str]", said: list[str], say: Callable[[str], None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            said.append(line.rstrip("\n"))
            say(f"  {said[-1]}")


def _wait(process: "subprocess.Popen[str]", seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: "subprocess.Popen[str]") -> None:
    """End the process, asking once; then everything in its group."""
    process.send_signal(signal.SIGINT)
    _wait(process, LAST_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _why(process: "subprocess.Popen[str]", seconds: float, *, is_late: bool) -> str:
    if is_late:
        return f"killed: it did not end after its {seconds:.0f} s"
    if process.returncode < 0:
        return f"ended by signal {-process.returncode} ({signal.strsignal(-process.returncode)})"
    return f"ended with exit code {process.returncode}"


def command_for(name: str, work: Path, seconds: float, path: Path, *, smoke: bool) -> list[str]:
    """Return the command that plays one stage of `benchmarks.run_gpu` alone, from now on."""
    words = ["--alone", name, "--work", str(work), "--total-s", str(seconds), "--to", str(path)]
    words += ["--began", str(time.monotonic())]
    return [sys.executable, "-m", "benchmarks.run_gpu", *words, *(["--smoke"] if smoke else [])]
