"""The trace pass: a few steps under torch's profiler, as a file to open and as a summary."""

import gzip
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.agent.probes.trace import ACTIVE_STEPS
from flatout.analysis.trace import summarise_trace
from flatout.records.errors import UserError
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_bytes
from flatout.tuning.passes import PassRunner, find_seen, with_note

FILES = "trace-*.json.gz"
MIN_SKIP, MAX_SKIP = 3, 20
"""Steps before the trace: what was warm-up in the timed pass, within these bounds."""
PROFILER_STEPS = 6
"""Steps alongside the traced ones: to warm the profiler up twice, to weigh one, and some to spare.
"""


def add(profile: Profile, runner: PassRunner) -> Profile:
    """Return the profile with a summary of the trace, which is written where it was asked for."""
    skip = min(max(profile.warmup_steps, MIN_SKIP), MAX_SKIP)
    with tempfile.TemporaryDirectory() as folder:
        trial = runner.run(
            words("progress.trace", n=str(ACTIVE_STEPS)),
            {"trace": {"skip": skip, "steps": ACTIVE_STEPS}},
            steps=skip + ACTIVE_STEPS + PROFILER_STEPS,
            keep=Path(folder),
            keep_names=(FILES,),
        )
        seen = find_seen(trial, "trace")
        if seen is None:
            return with_note(
                profile,
                words("note.no_trace_file", why=trial.message or words("note.profiler_failed")),
            )
        if not seen["file"]:
            return with_note(profile, words("note.no_trace_file", why=seen["why"]))
        return _read(profile, runner, Path(folder) / seen["file"], seen)


def check_target(path: Path) -> None:
    """Refuse a name that no viewer opens, before anything runs."""
    if path.is_dir() or path.name.endswith((".json", ".json.gz")):
        return
    raise UserError(
        f"a trace is a .json.gz or .json file, or lies in a folder that exists: {path} is neither"
    )


def target_of(path: Path, moment_s: float) -> Path:
    """Return the file to write; in a folder it has a name that TensorBoard's profiler plugin reads.

    >>> target_of(Path("/nowhere/trace.json.gz"), 1.0).name
    'trace.json.gz'
    """
    if not path.is_dir():
        return path
    return path / f"flatout.{int(moment_s * 1e3)}.pt.trace.json.gz"


def write_trace(source: Path, target: Path) -> None:
    """Copy a compressed trace, unpacked for a name without `.gz`; never a half-written file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if target.suffix == ".gz":
            shutil.copyfile(source, part)
        else:
            with gzip.open(source, "rb") as packed, part.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _read(profile: Profile, runner: PassRunner, file: Path, seen: Mapping[str, Any]) -> Profile:
    with gzip.open(file, "rt", encoding="utf-8", errors="replace") as text:
        events = json.load(text)["traceEvents"]
    summary = summarise_trace(events)
    if summary is None:
        return with_note(profile, words("note.no_trace_file", why=words("note.no_whole_step")))
    assert runner.trace_path is not None
    size = file.stat().st_size
    target = target_of(runner.trace_path, time.time())
    runner.tell(
        f"one step makes {format_bytes(seen['step_bytes'])} of trace; writing {seen['steps']} "
        f"steps, {format_bytes(size)} compressed, to {target}"
    )
    write_trace(file, target)
    return replace(profile, trace=replace(summary, path=str(target), file_bytes=size))
