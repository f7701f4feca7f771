"""Passes: further runs of the same script that look closer than the timed one may.

Each pass is a module with `add(profile, runner)`: it runs the workload once more with its own
probes and returns the profile with what it saw; `num_runs(profile)` says how often, where it is not
once. A pass that does not work leaves the profile as it was, with a note that says why.
"""

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Trial, Workload
from flatout.tuning.trials import TrialOptions, run_trial

NAMES = ("detail", "ceilings")
"""Every pass, the most telling first: what is left out for lack of time comes last."""

Tell = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class PassRunner:
    """Runs passes of one measurement within its time."""

    workload: Workload
    recipe: Recipe
    machine: Machine
    limit_s: float
    tell: Tell = lambda _: None
    started: float = field(default_factory=time.monotonic)
    trace_path: Path | None = None
    """Where the trace goes: a file, or a folder for TensorBoard."""
    num_runs: int = 0
    """Runs so far."""
    expected_runs: int = 0
    """Runs of the whole measurement; 0 where that is not known yet."""
    last_wall_s: float = 0.0
    """Wall time of the latest pass: what the next one is expected to take."""

    @property
    def left_s(self) -> float:
        """Seconds until the measurement's limit."""
        return self.limit_s - (time.monotonic() - self.started)

    def run(self, what: str, probes: Mapping[str, Mapping[str, Any]], **options: Any) -> Trial:
        """Run the workload with these probes; `options` are fields of `TrialOptions`."""
        self.num_runs += 1
        if self.expected_runs:
            of = str(max(self.expected_runs, self.num_runs))
            what = words("progress.run", what=what, n=str(self.num_runs), of=of)
        self.tell(what)
        left_s = max(self.left_s, 1.0)
        base = TrialOptions(limit_s=left_s, hang_s=left_s, probes=probes)
        workload = self.workload.under(self.recipe)
        trial = run_trial(workload, self.recipe, self.machine, replace(base, **options))
        self.last_wall_s = trial.wall_s
        return trial


def add_all(profile: Profile, runner: PassRunner, names: tuple[str, ...] = NAMES) -> Profile:
    """Return the profile after every pass for which there is time."""
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    counts = [x.num_runs(profile) if hasattr(x, "num_runs") else 1 for x in modules.values()]
    runner.expected_runs = runner.num_runs + sum(counts)
    for name, module in modules.items():
        if runner.left_s < runner.last_wall_s:
            profile = with_note(profile, words("note.no_time", name=name))
            continue
        profile = module.add(profile, runner)
    return profile


def with_note(profile: Profile, note: str) -> Profile:
    """Return the profile with one more note."""
    return replace(profile, notes=(*profile.notes, note))


def find_seen(trial: Trial, probe: str) -> Mapping[str, Any] | None:
    """Return what a probe saw, None where the pass did not work or the probe failed."""
    if trial.outcome not in (Outcome.OK, Outcome.NAN):
        return None
    found: Mapping[str, Any] | None = trial.details.get("probes", {}).get(probe)
    return found
