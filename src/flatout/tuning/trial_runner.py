"""The lab of one tuning: runs trials, repeats disturbed ones, keeps the journal.

The journal is append-only, one line a trial. The tuner decides from trial results and from the
time that is left: replaying the recorded ones first brings a resumed tuning to where it was, unless
it has time for another way now.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from flatout.agent.switching import SCREEN_LOG
from flatout.analysis import disturbance
from flatout.records.errors import UserError
from flatout.records.input_files import MAX_OWN_BYTES, parse_json, read_bytes
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Trial, Workload, trial_from_json
from flatout.tuning.trials import TrialOptions, run_trial

JOURNAL = "journal.jsonl"
ENDLESS = 10**9
"""More steps than any: what runs ends on its own, when it has seen enough."""
COMPILE_S = 300.0
"""A trial may be silent this long: compiling a deep model took 158 s on two cores."""
MAX_REPEATS = 3
"""How often one trial is run at most while others disturb it."""
MOST_WAIT_S, QUIET_S = 20.0, 1.0
"""How long a disturbed trial's repeat waits for quiet, and how long it has to be quiet."""
MAX_ACCEPTED_REPEATS = 2
"""The same where the load is accepted: it will not be gone the third time."""
ACCEPTED_BUSY_AFTER = 2
"""From this many on, an accepted load is taken to stay: repeating would only double the time."""
BUSY_AFTER = 6
"""From this many timed trials on, more disturbed than not means the machine is busy."""
KILLED = (Outcome.HANG, Outcome.OOM)
"""What becomes of trials that are ended from outside, at any moment."""
HEADER_WORDS = {
    "workload": "the command line",
    "torch": "torch",
    "device": "the device",
    "cpu": "the CPU",
    "cores": "the number of usable cores",
}
"""What a journal's trials belong to, alongside the script's files."""
MOST_FILES = 3
"""Changed files that are named: a checkout of another branch changes all."""

Runner = Callable[[Workload, Recipe, Machine, TrialOptions], Trial]


class MachineBusyError(Exception):
    """More than half of the trials were disturbed: nothing can be decided here now."""


@dataclass(slots=True, kw_only=True)
class TrialRunner:
    """Where trials are run. The only mutable thing in a tuning besides the ladder itself."""

    workload: Workload
    machine: Machine
    out: Path
    limit_s: float
    cache: Path | None = None
    was_compiled: bool = False
    """Whether an earlier tuning of the script left something in the compile cache."""
    accepts_load: bool = False
    may_repeat: Callable[[], bool] = lambda: True
    """Whether there is time for repeating a disturbed trial."""
    runner: Runner = run_trial
    recorded: dict[str, list[Trial]] = field(default_factory=dict)
    """Trials of an earlier, interrupted tuning, still to be replayed."""
    step_s: dict[str, list[float]] = field(default_factory=dict)
    """Step times of accepted timed trials, by recipe."""
    wall_s: dict[str, float] = field(default_factory=dict)
    """Wall time of the latest trial, by recipe and kind."""
    latest: Trial | None = None
    """The trial that ran last, where it was the base of a comparison."""
    wait: Callable[[float], None] = lambda _most_s: None
    """Waits until other processes leave the cores alone, for so many seconds at most."""
    timed: int = 0
    disturbed: int = 0
    foreign_shares: list[float] = field(default_factory=list)
    """Part of the cores that other processes used during each timed trial."""
    replayed_s: float = 0.0
    """Time the replayed trials took when they ran."""

    def time(self, recipe: Recipe, *, must_apply: bool = False) -> Trial:
        """Run one timed trial, again when other work disturbed it.

        On CUDA up to three more steps are traced, after those that are timed: without them no copy
        to the device is seen. Any timed trial may become the one whose profile says what to try
        next, and both sides of a pair have to be told alike, so all are traced; the guard's trials
        are not, nor are those of probes.

        Args:
            recipe: the techniques to time.
            must_apply: end the trial early where one of them refuses.

        Raises:
            MachineBusyError: if most trials are disturbed and that is not accepted.
        """
        for _ in range(MAX_ACCEPTED_REPEATS if self.accepts_load else MAX_REPEATS):
            options = replace(self._options(), ends_when_refused=must_apply, traces_kernels=True)
            key = f"time {key_of(recipe)}"
            trial = self._replayed(key) or self._noted(
                key, self.runner(self.workload, recipe, self.machine, options)
            )
            if trial.outcome is not Outcome.OK or trial.profile is None:
                return trial
            self.timed += 1
            self.foreign_shares.append(foreign_share_of(trial))
            why = disturbances(trial, trial.profile, self.machine)
            if not why:
                self._keep_time(recipe, trial.profile)
                return trial
            trial = replace(trial, details={**trial.details, "disturbed": why})
            self.disturbed += 1
            enough = ACCEPTED_BUSY_AFTER if self.accepts_load else BUSY_AFTER
            is_busy = self.timed >= enough and 2 * self.disturbed > self.timed
            if is_busy and not self.accepts_load:
                raise MachineBusyError
            if not self.may_repeat() or (self.accepts_load and is_busy):
                break
            if not self.accepts_load:
                self.wait(MOST_WAIT_S)
        if self.accepts_load and trial.profile is not None:
            self._keep_time(recipe, trial.profile)
        return trial

    def _keep_time(self, recipe: Recipe, profile: Profile) -> None:
        self.step_s.setdefault(key_of(recipe), []).append(profile.whole_step_ms / 1e3)

    def again(self, recipe: Recipe) -> Trial:
        """Return the trial of this recipe that ran last of all, as a base; else time it again."""
        latest, self.latest = self.latest, None
        if latest is not None and key_of(latest.recipe) == key_of(recipe):
            return latest
        return self.time(recipe)

    def guard(self, recipe: Recipe, name: str, spec: Mapping[str, Any], steps: int) -> Trial:
        """Run one untimed trial with the guard's recorder; its record lands in `out/guard/name`."""
        keep = (self.out / "guard" / name).resolve()
        keep.mkdir(parents=True, exist_ok=True)
        kind = f"guard {name}"
        if not self.recorded.get(f"{kind} {key_of(recipe)}"):
            # An earlier tuning's: a trial that leaves no record must not be judged by that.
            for old in keep.glob("guard*.json"):
                old.unlink()
        options = replace(self._options(), steps=steps, guard=spec, keep=keep)
        return self._run(kind, recipe, options)

    def look(
        self, what: str, recipe: Recipe, probes: Mapping[str, Any], steps: int | None
    ) -> Trial:
        """Run one trial that is not compared, with probes; `steps` as in `TrialOptions`."""
        return self._run(what, recipe, replace(self._options(), probes=probes, steps=steps))

    def screen(
        self, recipe: Recipe, options: Mapping[str, Any], number: int, limit_s: float
    ) -> Trial:
        """Run one process in which techniques are switched; its log lands in `out/screen/number`.

        Args:
            recipe: What is on all the time.
            options: What `flatout.agent.probes.screen` is started with.
            number: Counts the processes of one screen.
            limit_s: Time after which the process is ended; what it logged stays.
        """
        keep = (self.out / "screen" / str(number)).resolve()
        keep.mkdir(parents=True, exist_ok=True)
        kind = f"screen {number}"
        if not self.recorded.get(f"{kind} {key_of(recipe)}"):
            for old in keep.iterdir():
                old.unlink()
        options_of_trial = replace(
            self._options(),
            probes={"screen": options},
            steps=ENDLESS,
            limit_s=limit_s,
            keep=keep,
            keep_names=(SCREEN_LOG,),
        )
        return self._run(kind, recipe, options_of_trial)

    def cost_s(self, recipe: Recipe, default: float) -> float:
        """Return what one timed trial of this recipe takes, as far as is known."""
        return self.wall_s.get(f"time {key_of(recipe)}", default)

    def all_times(self) -> list[list[float]]:
        """Return accepted step times in seconds, grouped by recipe."""
        return list(self.step_s.values())

    def _options(self) -> TrialOptions:
        return TrialOptions(limit_s=self.limit_s, hang_s=COMPILE_S, cache=self.cache)

    def _run(self, kind: str, recipe: Recipe, options: TrialOptions) -> Trial:
        key = f"{kind} {key_of(recipe)}"
        return self._replayed(key) or self._noted(
            key, self.runner(self.workload, recipe, self.machine, options)
        )

    def _replayed(self, key: str) -> Trial | None:
        """Return the trial that the journal of an earlier tuning has; None where it has none."""
        waiting = self.recorded.get(key)
        if not waiting:
            return None
        trial = waiting.pop(0)
        self.replayed_s += trial.wall_s
        return self._kept_wall(key, trial)

    def _noted(self, key: str, trial: Trial) -> Trial:
        """Return a trial that is in the journal now."""
        if trial.outcome in KILLED and self.cache is not None:
            # One that was killed while it compiled leaves half a library, which the next loads.
            shutil.rmtree(self.cache, ignore_errors=True)
            self.cache.mkdir(parents=True, exist_ok=True)
        self._note({"key": key, "trial": trial.to_json()})
        return self._kept_wall(key, trial)

    def _kept_wall(self, key: str, trial: Trial) -> Trial:
        self.wall_s[key] = trial.wall_s
        if trial.outcome is not Outcome.REFUSED:  # those are over at once
            self.latest = None
        return trial

    def _note(self, row: Mapping[str, Any]) -> None:
        path = self.out / JOURNAL
        line = (json.dumps(row, default=str) + "\n").encode()
        try:
            with path.open("ab", buffering=0) as file:
                length = file.tell()
                if file.write(line) < len(line):
                    file.truncate(length)  # the rows so far can still be resumed from
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise UserError(
                f"cannot write to {path}: {error.strerror}; make room there, then go on with "
                "--resume"
            ) from None


def key_of(recipe: Recipe) -> str:
    """Return a text that equal recipes share."""
    return json.dumps(
        [[c.technique, dict(c.settings)] for c in recipe.choices], sort_keys=True, default=str
    )


def disturbances(trial: Trial, profile: Profile, machine: Machine) -> str:
    """Return how other work on the machine or on its device spoilt a trial, "" if none did."""
    load = trial.details.get("load", {})
    found = disturbance.of_load(load, profile, machine) or disturbance.of_device(profile.gpu)
    return "; ".join(found)


def foreign_share_of(trial: Trial) -> float:
    """Return the part of the cores that other processes used during a trial."""
    return float(trial.details.get("load", {}).get("foreign_share", 0.0))


def wait_for_quiet(most_s: float) -> None:
    """Return once other processes leave the cores alone, after so many seconds at the latest.

    Between two trials flatout itself does nothing: whatever is busy then is someone else's.
    """
    ends = time.monotonic() + most_s
    while time.monotonic() < ends:
        if psutil.cpu_percent(interval=QUIET_S) <= 100 * disturbance.FOREIGN_LIMIT:
            return


def make_out(out: Path) -> None:
    """Make the folder for the journal and the reports.

    Raises:
        UserError: if it cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another --out") from None


def open_journal(
    out: Path, header: Mapping[str, Any], *, resume: bool
) -> tuple[Mapping[str, Any], dict[str, list[Trial]]]:
    """Start the journal, or read the one of an interrupted tuning.

    Returned are its header, which says what the tuning began with, and its trials by key.

    Raises:
        UserError: if there is nothing to resume, or the journal belongs to another tuning.
    """
    path = out / JOURNAL
    try:
        if not resume:
            path.write_text(json.dumps({"header": header}) + "\n", encoding="utf-8")
            return header, {}
        lines = _whole_lines(path)
    except FileNotFoundError:
        raise UserError(
            f"nothing to resume: {path} does not exist; run tune without --resume"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    return _read_journal(path, lines, header)


def _whole_lines(path: Path) -> list[bytes]:
    """Return the whole lines of a journal; half of one at its end is cut off.

    That is of a process that was killed in mid-write: the next row would be appended to it.
    """
    try:
        lines = read_bytes(path, MAX_OWN_BYTES).splitlines(keepends=True)
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}; run tune without --resume") from None
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
        os.truncate(path, sum(map(len, lines)))
    return lines


def _read_journal(
    path: Path, lines: list[bytes], header: Mapping[str, Any]
) -> tuple[Mapping[str, Any], dict[str, list[Trial]]]:
    """Return the header and the trials by key.

    What cannot be read might be of another script or machine.

    Raises:
        UserError: if the journal is another tuning's, or a line of it cannot be read.
    """
    recorded: dict[str, list[Trial]] = {}
    number = 1
    try:
        begun = dict(parse_json(lines[0])["header"])
        if changes := _changes(begun, header):
            raise UserError(
                f"{path} belongs to another tuning: {'; '.join(changes)}; "
                "run tune without --resume, or choose another --out"
            )
        for line in lines[1:]:
            number += 1
            row = parse_json(line)
            recorded.setdefault(row["key"], []).append(trial_from_json(row["trial"]))
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"line {number} of {path} cannot be read, so nothing is taken from it; "
            "run tune without --resume"
        ) from None
    return begun, recorded


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what is another now than when a journal was begun, one line each."""
    if before.get("records") != now["records"]:
        return ["another version of flatout wrote it"]
    changes = [
        f"{words} was {before.get(key) or 'not known'} and is {now[key] or 'not known'} now"
        for key, words in HEADER_WORDS.items()
        if before.get(key) != now[key]
    ]
    if before.get("workload") != now["workload"]:
        return changes  # another script: that its files are others says nothing more
    was, files = before["files"], now["files"]
    mended = [name for name in was if name in files and was[name] != files[name]]
    changed = sorted(mended or was.keys() ^ files.keys())  # a fixed script may import others
    more = [f"{len(changed) - MOST_FILES} more"] if len(changed) > MOST_FILES else []
    return changes + [f"{name} changed since" for name in changed[:MOST_FILES] + more]


@dataclass(slots=True, kw_only=True)
class Budget:
    """The time a tuning may take."""

    total_s: float
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the tuning began."""
        return self.clock() - self.started

    @property
    def left_s(self) -> float:
        """Seconds left; negative once the budget is overdrawn."""
        return self.total_s - self.elapsed_s
