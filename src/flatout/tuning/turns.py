"""A pair of fresh processes that take turns, for what one machine's drift would hide.

On a shared machine whose speed wandered by a third within seconds, equal trials one after the
other differed by 23 % (standard deviation, 24 pairs of three scripts), in turns by 5 %: the record
`turns`. A pair costs about what its two trials cost one after the other.
"""

import math
import os
import socket
import statistics
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from flatout.agent.probes.turns import MEDIAN, WARM_TURNS
from flatout.launch.trial_process import SharedRun, hold_folder_of
from flatout.records.machine import Machine
from flatout.records.recipe import Recipe
from flatout.records.statistics import Prior
from flatout.records.trial import Outcome, Trial, Workload
from flatout.tuning.passes import find_seen
from flatout.tuning.trials import TrialOptions, run_trial

LEAST_FREE = 2.5
"""Times what one trial takes at its peak that the host's memory has to hold for two of them."""
MOST_BUSY = 0.1
"""Share of its waiting in which a process that goes on working spoils the other one's turns."""
BETWEEN_PROCESSES = 0.03
"""Standard deviation of what two equal processes differ by whatever their turns say, in logs: their
memory lies elsewhere. Measured: 0.02 for a GPT and a table, 0.07 for a small CNN."""
PRIOR_FREEDOM = 4
"""Degrees of freedom that this alone is worth: pairs that differ by more soon say so."""
MOST_FREEDOM = 20
"""Degrees of freedom of turns and processes at most: with this, processes that differ by 7 % make
0.7 % of equal recipes look like a gain (simulated, turns of 20 %)."""


def can_take_turns(trial: Trial, machine: Machine) -> bool:
    """Return whether pairs of a script may take turns, by a trial of it alone.

    Both sides need memory at the same time, and what one writes the other must not find. A GPU's
    memory is seldom free twice.
    """
    profile = trial.profile
    if profile is None or profile.device_kind != "cpu" or profile.ranks:
        return False
    is_apart = trial.details.get("is_overlaid") or not trial.undone
    is_small = LEAST_FREE * profile.peak_bytes.device < machine.memory_bytes
    return bool(is_apart) and is_small


def play_in_turns(
    workload: Workload,
    recipes: tuple[Recipe, Recipe],
    machine: Machine,
    options: TrialOptions,
    starts_with_base: bool,  # noqa: FBT001  as its runner's type has it
) -> tuple[Trial, ...]:
    """Return the trials of the base and the candidate, run at the same time; none if that failed.

    A candidate that does not apply is told; what else goes wrong may be for want of memory, or
    because the other side was there.
    """
    is_over = threading.Event()
    sockets = socket.socketpair()

    def run(number: int) -> Trial:
        recipe, own = recipes[number], sockets[number]
        is_first = starts_with_base == (number == 0)
        turn = {"descriptor": own.fileno(), "is_first": is_first, "root": os.getpid()}
        asked = replace(
            options,
            probes={"turns": turn},
            measure_s=2 * options.measure_s,
            ends_when_refused=number == 1,
        )
        shared = SharedRun(lock=lock, passed=own.fileno(), is_cancelled=is_over.is_set)
        try:
            return run_trial(workload.under(recipe), recipe, machine, asked, shared)
        finally:
            own.close()  # the other side goes on alone

    with hold_folder_of(workload) as lock, ThreadPoolExecutor(1) as pool:
        candidate = pool.submit(run, 1)
        try:
            pair = run(0), candidate.result()
        except BaseException:
            is_over.set()
            raise
    return pair if all(map(_counts, pair)) or pair[1].not_applied else ()


def _counts(trial: Trial) -> bool:
    """Return whether a trial is a measurement: it kept still while it waited, and wrote nothing."""
    turns = find_seen(trial, "turns")
    if trial.outcome is not Outcome.OK or trial.profile is None or not turns:
        return False
    is_apart = trial.details.get("is_overlaid") or not trial.undone
    is_still = turns["busy_share"] <= MOST_BUSY and not turns["threads"]
    return bool(is_apart) and is_still and len(turns["turns_s"]) > WARM_TURNS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """What the turns of a pair say."""

    log_ratio: float
    """Of the base's step to the candidate's: above 0 the candidate is faster."""
    own_variance: float
    """Of that, by how much the turns differ."""
    freedom: int
    """Degrees of freedom of this one."""

    @property
    def variance(self) -> float:
        """The same between pairs of equal recipes, whose processes differ too."""
        return self.own_variance + BETWEEN_PROCESSES**2


def compare_turns(pair: Sequence[Trial]) -> Turned:
    """Return the middle ratio of the two sides' turns: those next to each other saw one machine."""
    base, candidate = ((find_seen(trial, "turns") or {})["turns_s"] for trial in pair)
    ratios = [math.log(a / b) for a, b in zip(base, candidate, strict=False)][WARM_TURNS:]
    own = MEDIAN * statistics.variance(ratios) / len(ratios)
    return Turned(log_ratio=statistics.median(ratios), own_variance=own, freedom=len(ratios) - 1)


def noise_of(turned: Sequence[Turned], others: Iterable[Sequence[float]]) -> Prior:
    """Return how far pairs in turns of equal recipes differ, before they are looked at.

    By their turns; or by what other comparisons' pairs differed by, where that is more. The turns
    are many, of what processes differ by little is known: the degrees of freedom are Welch's and
    Satterthwaite's for such a sum.
    """
    own = statistics.fmean(one.own_variance for one in turned)
    expected = own + BETWEEN_PROCESSES**2
    groups = [group for group in others if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in groups)
    if freedom >= PRIOR_FREEDOM and squares / freedom > expected:
        return Prior(variance=squares / freedom, freedom=freedom)
    unsure = own**2 / sum(one.freedom for one in turned) + BETWEEN_PROCESSES**4 / PRIOR_FREEDOM
    return Prior(variance=expected, freedom=min(MOST_FREEDOM, int(expected**2 / unsure)))
