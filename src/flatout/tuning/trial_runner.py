"""Runs the experiments of one tuning and keeps its journal.

The journal is append-only, one line an experiment; those of the guard's own trials come before the
check that they are for. The policy decides from these records alone, so replaying them first brings
a resumed tuning to where it was, unless it has time for another way now.
"""

import contextlib
import errno
import json
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from flatout.agent.switching import SCREEN_LOG
from flatout.analysis import disturbance
from flatout.launch.folder_lock import FolderBusyError, hold_folder
from flatout.launch.trial_process import scratch_root
from flatout.records.errors import UserError
from flatout.records.input_files import MAX_OWN_BYTES, parse_json, read_bytes
from flatout.records.machine import Machine
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Trial, Workload
from flatout.tuning.experiments import (
    Asking,
    Budget,
    Experiment,
    Judgement,
    Record,
    TrialHistory,
    record_from_json,
)
from flatout.tuning.passes import find_seen
from flatout.tuning.trials import TrialOptions, run_trial
from flatout.tuning.turns import play_in_turns

T = TypeVar("T")
JOURNAL = "journal.jsonl"
COMPILE_S = 300.0
"""A trial may be silent this long: compiling a deep model took 158 s on two cores."""
QUIET_S = 1.0
"""How long it has to be quiet before a disturbed trial is repeated."""
KILLED = (Outcome.HANG, Outcome.OOM)
"""What becomes of trials that are ended from outside, at any moment."""
LEFT_FILES = {"guard": "guard*.json", "screen": "*"}
"""By kind of the experiments whose trials leave files, in a folder of that name: which."""
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
PairRunner = Callable[
    [Workload, tuple[Recipe, Recipe], Machine, TrialOptions, bool], tuple[Trial, ...]
]


@dataclass(slots=True, kw_only=True)
class TrialRunner:
    """Runs experiments, those of an earlier tuning from its journal, and writes the journal."""

    workload: Workload
    machine: Machine
    out: Path
    limit_s: float
    cache: Path | None = None
    was_compiled: bool = False
    """Whether an earlier tuning of the script left something in the compile cache."""
    accepts_load: bool = False
    budget: Budget = field(default_factory=lambda: Budget(total_s=math.inf))
    runner: Runner = run_trial
    recorded: dict[str, list[Record]] = field(default_factory=dict)
    """Experiments of an earlier, interrupted tuning, still to be replayed."""
    wait: Callable[[float], None] = lambda _most_s: None
    """Waits until other processes leave the cores alone, for so many seconds at most."""
    judge: Callable[[Experiment], Judgement] | None = None
    """Answers checks."""
    elsewhere: Callable[[Experiment], tuple[Trial, ...]] = lambda _asked: ()
    """Returns the trials of a pair that another host has played, if any."""
    in_turns: PairRunner = play_in_turns
    clock: Callable[[], float] = time.monotonic
    num_runs: int = 0
    """Trials so far, replayed ones too."""
    recorded_s: float = field(init=False)
    """Time that the recorded trials took when they ran, those of the guard too."""
    history: TrialHistory = field(init=False)
    """What was seen of the experiments that were driven here."""
    began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self.clock()
        rows = [row for rows in self.recorded.values() for row in rows]
        self.recorded_s = sum(row.trial.wall_s for row in rows if row.trial)
        self.history = TrialHistory(
            machine=self.machine, budget=self.budget, accepts_load=self.accepts_load
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds since this runner began."""
        return self.clock() - self.began_s

    def drive(self, asking: Asking[T]) -> T:
        """Run whatever is asked for, and return what follows from it; Ctrl-C is thrown in there."""
        try:
            experiment = next(asking)
            while True:
                try:
                    record = self.run(experiment)
                except KeyboardInterrupt as wish:  # noqa: PERF203  an experiment takes seconds
                    experiment = asking.throw(wish)
                else:
                    experiment = asking.send(record)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def run(self, experiment: Experiment) -> Record:
        """Return the record of an experiment: from the journal of an earlier tuning, or run now."""
        waiting = self.recorded.get(experiment.key)
        if waiting:
            # What was recorded takes nothing of this tuning's time.
            record = replace(waiting.pop(0), elapsed_s=self.elapsed_s)
            self.num_runs += (record.trial is not None) + len(record.pair)
            return record
        trial = judgement = None
        pair: tuple[Trial, ...] = ()
        if experiment.kind == "wait":
            self.wait(experiment.options["most_s"])
        elif experiment.kind == "check":
            assert self.judge is not None
            judgement = self.judge(experiment)
        elif experiment.kind == "pair":
            # One that was played here before a tuning went on is replayed as it was.
            if not self.recorded.get(replace(experiment, kind="time", name="").key):
                pair = self.elsewhere(experiment)
            self.num_runs += len(pair)
        elif experiment.kind == "turns":
            recipes = experiment.options["base"], experiment.recipe
            starts_with_base = experiment.options["starts_with_base"]
            asked = self._options_of(replace(experiment, options={}))
            pair = self.in_turns(self.workload, recipes, self.machine, asked, starts_with_base)
            self.num_runs += len(recipes)
            self._clear_after(pair)
        else:
            asked = self._options_of(experiment)
            self.num_runs += 1
            recipe = experiment.recipe
            trial = self.runner(self.workload.under(recipe), recipe, self.machine, asked)
            self._clear_after([trial])
            if experiment.kind == "screen" and asked.keep and not find_seen(trial, "screen"):
                log = {"screen_log": read_log(asked.keep)}
                trial = replace(trial, details={**trial.details, **log})
        record = Record(
            key=experiment.key,
            elapsed_s=self.elapsed_s,
            trial=trial,
            judgement=judgement,
            pair=pair,
        )
        self._note(record.to_json())
        return record

    def _clear_after(self, trials: Sequence[Trial]) -> None:
        """Drop what was compiled so far where one was killed: it may have left half a library."""
        if self.cache is not None and any(trial.outcome in KILLED for trial in trials):
            shutil.rmtree(self.cache, ignore_errors=True)
            self.cache.mkdir(parents=True, exist_ok=True)

    def _options_of(self, experiment: Experiment) -> TrialOptions:
        """Return how the trial is run that an experiment asks for.

        On CUDA up to three more steps of a recipe's first timed trial are traced, after those that
        are timed: without them no copy to the device is seen. The guard's trials are not traced,
        nor are those of probes.
        """
        base = TrialOptions(limit_s=self.limit_s, hang_s=COMPILE_S, cache=self.cache)
        options = replace(base, **experiment.options)
        if experiment.kind not in LEFT_FILES:
            return options
        keep = (self.out / experiment.kind / experiment.name).resolve()
        keep.mkdir(parents=True, exist_ok=True)
        # A trial that leaves no record must not be judged by that of an earlier tuning.
        for old in keep.glob(LEFT_FILES[experiment.kind]):
            old.unlink()
        return replace(options, keep=keep, keep_names=(SCREEN_LOG,))

    def time(self, recipe: Recipe, *, must_apply: bool = False) -> Trial:
        """Run one timed trial, again when other work disturbed it; as `TrialHistory.time`."""
        return self.drive(self.history.time(recipe, must_apply=must_apply))

    def guard(self, recipe: Recipe, name: str, spec: Mapping[str, Any], steps: int) -> Trial:
        """Run one untimed trial with the guard's recorder; its record lands in `out/guard/name`."""
        options = {"guard": spec, "steps": steps}
        asked = Experiment(kind="guard", recipe=recipe, name=name, options=options)
        trial = self.run(asked).trial
        assert trial is not None
        return trial

    def _note(self, row: Mapping[str, Any]) -> None:
        path = self.out / JOURNAL
        line = journal_line(row)
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


def journal_line(row: Mapping[str, Any]) -> bytes:
    """Return a row of a journal with the checksum by which a damaged one is known."""
    body = json.dumps(row, default=str).encode()
    return b'%s, "crc32": %d}\n' % (body[:-1], zlib.crc32(body))


def read_log(folder: Path) -> list[Any]:
    """Return the rows that a screen noted before it ended badly; half a line at the end is none."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob(SCREEN_LOG)]
    logs = [text[: text.rfind("\n") + 1].splitlines() for text in texts]
    return [json.loads(line) for line in max(logs, key=len, default=[])]


def wait_for_quiet(most_s: float) -> None:
    """Return once other processes leave the cores alone, after so many seconds at the latest.

    Between two trials flatout itself does nothing: whatever is busy then is someone else's.
    """
    ends = time.monotonic() + most_s
    while time.monotonic() < ends:
        if psutil.cpu_percent(interval=QUIET_S) <= 100 * disturbance.FOREIGN_LIMIT:
            return


@contextlib.contextmanager
def held_out(out: Path) -> Iterator[None]:
    """Make the folder for the journal and the reports, and keep other tunings out of it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(hold_folder(out, scratch_root()))
        except FolderBusyError:
            raise UserError(
                f"another tuning writes to {out}: wait for its end, or choose another --out"
            ) from None
        yield


def open_journal(
    out: Path, header: Mapping[str, Any], *, resume: bool
) -> tuple[Mapping[str, Any], dict[str, list[Record]]]:
    """Start the journal, or read the one of an interrupted tuning.

    Returned are its header, which says what the tuning began with, and its records by key.
    """
    path = out / JOURNAL
    try:
        if not resume:
            if "survey" in header and _is_tunings(path):
                raise UserError(
                    f"{out} holds a tuning, which --resume may need: choose another --out"
                )
            path.write_bytes(journal_line({"header": header}))
            return header, {}
        lines = _whole_lines(path)
    except FileNotFoundError:
        raise UserError(
            f"nothing to resume: {path} does not exist; run tune without --resume"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    return _read_journal(path, lines, header)


def _is_tunings(path: Path) -> bool:
    """Return whether a journal is there that a survey did not write."""
    try:
        with path.open("rb") as journal:
            return b'"survey"' not in journal.readline(MAX_OWN_BYTES)
    except FileNotFoundError:
        return False


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
) -> tuple[Mapping[str, Any], dict[str, list[Record]]]:
    """Return the header and the records by key.

    What cannot be read might be of another script or machine.
    """
    recorded: dict[str, list[Record]] = {}
    number = 1
    try:
        begun = dict(parse_json(lines[0])["header"])  # other versions wrote no checksum
        if changes := _changes(begun, header):
            raise UserError(
                f"{path} belongs to another tuning: {'; '.join(changes)}; "
                "run tune without --resume, or choose another --out"
            )
        _row(lines[0])
        for line in lines[1:]:
            number += 1
            row = _row(line)
            recorded.setdefault(row["key"], []).append(record_from_json(row))
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"line {number} of {path} cannot be read, so nothing is taken from it; "
            "run tune without --resume"
        ) from None
    return begun, recorded


def _row(line: bytes) -> Any:
    """Return what `journal_line` wrote."""
    body, _, checksum = line.rstrip(b"\n").rpartition(b', "crc32": ')
    if checksum != b"%d}" % zlib.crc32(body + b"}"):
        raise ValueError("damaged")
    return parse_json(line)


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
