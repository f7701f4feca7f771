"""What every suite needs: the machine, a place to work, ways to compare, and what it returns."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flatout.records.ablation import Ablation, Comparison
from flatout.records.errors import UserError
from flatout.records.live import Progress
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.statistics import compare, gather
from flatout.records.trial import Outcome, Trial, Workload, trial_from_json
from flatout.records.units import format_interval, format_ratio
from flatout.tuning.pairs import pace_ms
from flatout.tuning.trial_runner import JOURNAL, TrialRunner
from flatout.workflow.demo import scenarios

LIMIT_S = 300.0
"""Wall time of one trial at most."""
MOST_SAID = 2_000
"""Characters that are kept of what a script that failed said last."""


class TrialFailedError(Exception):
    """A trial that had to work did not; a suite without it has nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how long a suite works."""

    machine: Machine
    work: Path
    """An empty folder that is thrown away afterwards."""
    budget_s: float = 600.0
    """Time for each tuning."""
    only: tuple[str, ...] = ()
    """Workloads of a suite that has several; empty for all."""
    parts: Path | None = None
    """Where a suite of several workloads keeps the results of each, for a later run to add to."""
    say: Callable[[str], None] = print
    note: Callable[[Mapping[str, Any]], None] = lambda _: None
    """Told the result so far, for the case that the process ends before there is a whole one."""

    def workload(self, target: Path, *arguments: str, name: str = "") -> Workload:
        """Return a script as a user would start it, in the folder of that name below `work`."""
        folder = self.work / name
        folder.mkdir(parents=True, exist_ok=True)
        return Workload(
            target=str(target), arguments=arguments, folder=folder, python=sys.executable
        )

    def chosen(self, known: Sequence[str], kind: str) -> tuple[Sequence[str], Path]:
        """Return what is measured now of a suite of several, and the folder of the parts.

        Raises:
            UserError: if something is asked for that the suite does not have.
        """
        unknown = sorted({*self.only} - {*known})
        if unknown:
            raise UserError(f"no {kind} {', '.join(unknown)}; there are {', '.join(known)}")
        parts = self.parts or self.work / "parts"
        parts.mkdir(parents=True, exist_ok=True)
        return self.only or known, parts

    def tell(self, progress: Progress) -> None:
        """Pass on what a tuning wants kept on the screen."""
        if progress.event:
            self.say(f"  {progress.elapsed_s:6.1f} s  {progress.event}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measured claim."""

    theme: str
    claim: str
    holds: bool
    finding: str
    """What was measured, in a few words; the generated table shows it alongside the claim."""
    table: Sequence[Sequence[str]]
    """Header and rows of the one table of the record's page."""
    raw: Mapping[str, Any]
    """Everything behind the table: every repeat, not only means."""
    repeat: str = ""
    """The command that does it again; empty for the suite of the theme's name."""
    recipe: Recipe | None = None
    notes: Sequence[str] = ()
    ablations: Sequence[Ablation] = ()
    """The tunings behind it: their predictions are set alongside what was measured."""
    calibration: Sequence[Sequence[str]] = ()
    """Header and rows of that, where no tuning is behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of an interleaved comparison."""

    name: str
    lab: TrialRunner
    recipe: Recipe = Recipe()
    profiles: list[Profile] = field(default_factory=list)

    @property
    def times_s(self) -> list[float]:
        """One step time per process, in the order of the rounds."""
        return [profile.whole_step_ms / 1e3 for profile in self.profiles]

    @property
    def median_ms(self) -> float:
        """Median over the processes."""
        return 1e3 * sorted(self.times_s)[len(self.profiles) // 2]


def open_lab(
    bench: Bench, workload: Workload, name: str, *, cache: Path | None = None
) -> TrialRunner:
    """Return a lab with its journal in a folder of its own, and what is compiled in `cache`."""
    out = bench.work / name
    out.mkdir(parents=True, exist_ok=True)
    return TrialRunner(
        workload=workload, machine=bench.machine, out=out, limit_s=LIMIT_S, cache=cache
    )


def make_photographs(folder: Path, count: int, *options: str) -> Path:
    """Make the photographs of the scenarios."""
    command = [sys.executable, str(scenarios() / "photographs.py"), str(folder), *options]
    subprocess.run([*command, "--count", str(count)], check=True, capture_output=True)
    return folder


def interleave(arms: Sequence[Arm], rounds: int) -> None:
    """Run each arm once per round, the order turned round every time."""
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            trial = arm.lab.time(arm.recipe)
            if trial.outcome is not Outcome.OK or trial.profile is None or trial.not_applied:
                missed = ", ".join(f"{a.technique} {a.status}" for a in trial.not_applied)
                raise TrialFailedError(f"{arm.name}: {trial.message or missed}")
            arm.profiles.append(trial.profile)


def comparison(base: Arm, candidate: Arm) -> Comparison:
    """Return how many times faster the candidate is, from the rounds both ran in.

    For equally many samples, where it changes the batch.
    """
    if not base.profiles:
        return compare(gather(base.times_s, candidate.times_s))
    times_s = [pace_ms(profile, base.profiles[0]) / 1e3 for profile in candidate.profiles]
    return compare(gather(base.times_s, times_s))


def cells(pair: Comparison) -> tuple[str, str, str]:
    """Return ratio, interval and n for a table."""
    return format_ratio(pair.ratio), format_interval(*pair.interval), str(pair.n)


def calibration(ablations: Sequence[Ablation]) -> list[tuple[str, ...]]:
    """Return each technique's predicted and measured ratio, or nothing where none was measured."""
    rows = [
        (
            item.technique,
            format_ratio(item.predicted),
            format_ratio(item.bound) if item.bound else "",
            format_ratio(item.measured),
            f"{item.error:.2f}",
        )
        for ablation in ablations
        for item in ablation.calibration
    ]
    header = ("technique", "predicted", "at most", "measured", "measured / predicted")
    return [header, *rows] if rows else []


def trials_in(folder: Path) -> list[dict[str, Any]]:
    """Return every trial below a folder, as its journals have it, cut down to what was measured."""
    return [
        {"journal": path.parent.name, "key": row["key"]} | brief(trial_from_json(row["trial"]))
        for path in sorted(folder.rglob(JOURNAL))
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if "trial" in row
    ]


def brief(trial: Trial) -> dict[str, Any]:
    """Return what one trial measured, what went wrong in it and how disturbed it was."""
    measured: dict[str, Any] = {
        "recipe": trial.recipe.label,
        "outcome": trial.outcome.value,
        "message": trial.message,
        "traceback": trial.traceback[-MOST_SAID:],
        "not_applied": [asdict(lever) for lever in trial.not_applied],
        "errors": list(trial.details.get("errors", ())),
        "wall_s": trial.wall_s,
        "load": dict(trial.details.get("load", {})),
    }
    if trial.profile is None:
        return measured
    plain = trial.profile.to_json()
    kept = ("step_ms", "phases_ms", "samples_per_s", "peak_bytes", "overhead_share", "warmup_steps")
    return (
        measured
        | {name: plain[name] for name in kept}
        | {"whole_step_ms": trial.profile.whole_step_ms}
    )
