"""Other hosts that play pairs of a tuning, while this one plays the pair before them.

A pair is played whole on one host, so only trials of one machine are compared. Pairs count in the
order in which they were asked for, whichever is over first: the sequential rule sees what it would
see of one host, and what it does not ask for any more is ended. All else runs on this host. A host
on which a pair does not count is not used again, and its pair is played here.
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from flatout.hardware.machine import read_machine
from flatout.launch.trial_process import clean_up_stale_trials, compile_cache
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Trial, Workload
from flatout.tuning.experiments import Experiment, MachineBusyError, key_of
from flatout.tuning.pairs import Sides, ended_with, failed_verdict, play_pair
from flatout.tuning.trial_runner import Runner, TrialRunner, wait_for_quiet
from flatout.tuning.trials import TrialOptions, run_trial

CANCEL_S = 10.0
"""What hosts have at most to end pairs that are not asked for any more, before those of the next
two recipes: one that needs longer is left out of them."""
END_S = 30.0
"""The same at the end of a tuning."""
POLL_S = 0.05

Played = tuple[Trial, ...] | str
"""The trials that count, the base's first; or why they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTask:
    """What a host is asked to play."""

    base: Recipe
    candidate: Recipe | None = None
    """None for one trial of the base, which counts for nothing: a host's first one reads all files
    for the first time, and shows whether the script runs there."""
    starts_with_base: bool = True


class Host(Protocol):
    """A host of the kind of this one; it plays one thing at a time."""

    name: str

    def begin(self, task: HostTask) -> None:
        """Begin to play, and return at once."""

    def is_done(self) -> bool:
        """Return whether what was begun is over."""

    def result(self) -> Played:
        """Return what was played, once that is over."""

    def cancel(self) -> None:
        """Have what was begun ended, and return at once."""


@dataclass(slots=True, kw_only=True)
class PairHosts:
    """The hosts of one tuning but for its own, and what they play."""

    hosts: list[Host] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Which hosts were not used, or not to the end, and why."""
    say: Callable[[str], None] = lambda _text: None
    _cold: list[Host] = field(init=False)
    """Those that have begun nothing yet."""
    _warming: list[Host] = field(default_factory=list)
    """Those of whose first trial no one knows yet."""
    _asked: deque[tuple[Host, HostTask]] = field(default_factory=deque)
    """Pairs that are not counted yet, in their order."""

    def __post_init__(self) -> None:
        self._cold = [*self.hosts]

    def next_pair(self, asked: Experiment) -> tuple[Trial, ...]:
        """Return the trials of the next pair where a host was asked for it; else none.

        It is played here then, and the hosts that are free begin on those after it.
        """
        base, candidate = asked.options["base"], asked.recipe
        if any((task.base, task.candidate) != (base, candidate) for _, task in self._asked):
            # What became of pairs that no one asks for any more says nothing.
            self._end([host for host, _ in self._asked], CANCEL_S)
        if self._asked:
            host, _ = self._asked.popleft()
            return self._counted(host)
        free = [host for host in [*self.hosts] if self._is_free(host)]
        for host in self._cold:
            host.begin(HostTask(base=base))
        self._warming += self._cold
        self._cold = []
        starts_with_base = asked.options["starts_with_base"]
        for host in free[: asked.options["most"]]:
            starts_with_base = not starts_with_base
            task = HostTask(base=base, candidate=candidate, starts_with_base=starts_with_base)
            host.begin(task)
            self._asked.append((host, task))
        return ()

    def end(self) -> None:
        """End what runs on the hosts, and wait for that."""
        self._end([host for host in self.hosts if host not in self._cold], END_S)

    def _end(self, hosts: Sequence[Host], most_s: float) -> None:
        """End what hosts play, and wait for all of them together, so long at most."""
        self._asked.clear()
        for host in hosts:
            host.cancel()
        ends_at = time.monotonic() + most_s
        while not all(host.is_done() for host in hosts) and time.monotonic() < ends_at:
            time.sleep(POLL_S)

    def _is_free(self, host: Host) -> bool:
        if host in self._cold or not host.is_done():
            return False
        if host in self._warming:
            self._warming.remove(host)
            self._counted(host)
        return host in self.hosts

    def _counted(self, host: Host) -> tuple[Trial, ...]:
        """Return what a host has played; one where that does not count is not used again."""
        found = host.result()
        if isinstance(found, str):
            self._drop(host, found)
            return ()
        return tuple(replace(t, details={**t.details, "host": host.name}) for t in found)

    def _drop(self, host: Host, why: str) -> None:
        self.hosts.remove(host)
        self._cold = [one for one in self._cold if one is not host]
        self.notes.append(words("hosts.dropped", host=host.name, why=why))
        self.say(self.notes[-1])


def play_task(
    workload: Workload,
    task: HostTask,
    limit_s: float,
    *,
    run: Runner = run_trial,
    wait: Callable[[float], None] = wait_for_quiet,
) -> Played:
    """Play a task on this host, for a tuning on another one."""
    clean_up_stale_trials()
    latest: dict[str, Trial] = {}

    def noted(workload: Workload, recipe: Recipe, machine: Machine, options: TrialOptions) -> Trial:
        # What a device runs under a recipe is looked at where the tuning is, once.
        trial = run(workload, recipe, machine, replace(options, traces_kernels=False))
        latest[key_of(recipe)] = trial
        return trial

    with tempfile.TemporaryDirectory(prefix="flatout-pair-") as out:
        runner = TrialRunner(
            workload=workload,
            machine=read_machine(torch=False),
            out=Path(out),
            limit_s=limit_s,
            cache=compile_cache(workload),
            wait=wait,
            runner=noted,
        )
        try:
            why = _why_not(runner, task)
        except MachineBusyError:
            why = words("hosts.busy")
    recipes = [task.base] if task.candidate is None else [task.base, task.candidate]
    return why or tuple(latest[key_of(recipe)] for recipe in recipes)


def _why_not(runner: TrialRunner, task: HostTask) -> str:
    """Play a task; return why what was played does not count, "" where it does."""
    if task.candidate is None:
        trial = runner.time(task.base)
        is_measured = trial.outcome is Outcome.OK and trial.profile is not None
        return "" if is_measured else words("hosts.failed", why=ended_with(trial))
    sides = Sides()
    failure = runner.drive(
        play_pair(
            runner.history, task.base, task.candidate, sides, starts_with_base=task.starts_with_base
        )
    )
    if failure is not None:
        return words("hosts.failed", why=failed_verdict(failure)[1])
    return "" if sides.base else sides.disturbed[-1]
