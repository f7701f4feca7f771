"""The detail pass: memory over the step, and the lines that make the host wait."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.analysis.memory import memory_story, sync_points
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.trial import Trial
from flatout.tuning.passes import PassRunner, find_seen, with_note

UNSEEN_STEPS = 6
"""Steps before the observed ones (three of warm-up, two to settle), and one to end in."""
MANY_STEPS = 20
"""Training steps of the pass where they are fast: a log line every tenth step is seen twice."""
FEW_STEPS = 10
"""Training steps where they are slow: four observed ones still give a slope."""
SLOW_STEP_MS = 1_000.0
"""Steps of a second make a pass of `MANY_STEPS` as long as the timed one may be at most."""
OBSERVED_STEPS = 8
"""Steps whose memory is followed, where they are fast."""
SNAPSHOT = "memory-snapshot.pickle"
"""Torch's own record of a GPU's memory, for pytorch.org/memory_viz; written alongside a trace."""


def add(profile: Profile, runner: PassRunner) -> Profile:
    """Return the profile with its memory story and its sync points."""
    with tempfile.TemporaryDirectory() as folder:
        profile = _look(profile, runner, Path(folder))
        kept = Path(folder) / SNAPSHOT
        if profile.memory is None or runner.trace_path is None or not kept.exists():
            return profile
        target = runner.trace_path / SNAPSHOT
        shutil.copyfile(kept, target)
        return replace(profile, memory=replace(profile.memory, snapshot=str(target)))


def _look(profile: Profile, runner: PassRunner, folder: Path) -> Profile:
    steps = MANY_STEPS if profile.step_ms.median < SLOW_STEP_MS else FEW_STEPS
    what = words("progress.detail")
    path = runner.trace_path  # a trace goes into a folder, and there is device memory to picture
    snapshot = SNAPSHOT if path and path.is_dir() and profile.device_kind == "cuda" else None
    options: dict[str, Any] = {"steps": steps, "keep": folder, "keep_names": (SNAPSHOT,)}
    trial = runner.run(what, _probes(steps, snapshot, listens=True), **options)
    if find_seen(trial, "memory") is None or find_seen(trial, "syncs") is None:
        # Watching every operator is what can go wrong; the rest works without.
        profile = with_note(profile, words("note.detail_again", why=_reason(trial)))
        trial = runner.run(what, _probes(steps, snapshot, listens=False), **options)
    memory, syncs = find_seen(trial, "memory"), find_seen(trial, "syncs")
    if memory is None and syncs is None:
        return with_note(profile, words("note.no_detail", why=_reason(trial)))
    for seen in (memory, syncs):
        for name, why in seen["notes"] if seen else ():
            profile = with_note(profile, words(f"note.{name}", why=why))
    return replace(
        profile,
        memory=memory_story(memory) if memory else None,
        syncs=sync_points(syncs, _timed_share(profile, trial)) if syncs else (),
    )


def _timed_share(profile: Profile, watched: Trial) -> float:
    """Return a timed step as a part of a watched one: 1 where watching made it no longer."""
    watched_ms = watched.profile.step_ms.median if watched.profile else 0.0
    return min(1.0, profile.step_ms.median / watched_ms) if watched_ms else 1.0


def _probes(steps: int, snapshot: str | None, *, listens: bool) -> Mapping[str, Mapping[str, Any]]:
    observed = min(OBSERVED_STEPS, steps - UNSEEN_STEPS)
    memory = {"steps": observed, "listens": listens, "snapshot": snapshot}
    return {"memory": memory, "syncs": {"listens": listens}}


def _reason(trial: Trial) -> str:
    errors = trial.details.get("errors") or [""]
    return trial.message or str(errors[0]) or "it ended without a result"
