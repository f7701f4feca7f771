"""What a tuning asks for, and what it was answered: both are records, and nothing runs here.

The policy is written as generators: `trial = yield from history.time(recipe)` asks for an
experiment and goes on with its result. Whoever drives it runs the experiment
(`flatout.tuning.trial_runner`) or reads it from a journal; the policy cannot tell which. It reads
no clock either: the time that is left is that of the latest record. So the same records always
lead to the same next experiment.
"""

import json
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from flatout.analysis import disturbance
from flatout.analysis.profile import with_kernels_of
from flatout.records.ablation import LossCheck
from flatout.records.json_records import from_plain, to_plain
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Trial, trial_from_json

T = TypeVar("T")
ENDLESS = 10**9
"""More steps than any: what runs ends on its own, when it has seen enough."""
MAX_REPEATS = 3
"""How often one trial is run at most while others disturb it."""
MAX_ACCEPTED_REPEATS = 2
"""The same where the load is accepted: it will not be gone the third time."""
MOST_WAIT_S = 20.0
"""How long a disturbed trial's repeat waits for quiet."""
ACCEPTED_BUSY_AFTER = 2
"""From this many on, an accepted load is taken to stay: repeating would only double the time."""
MOST_MISSED = 2
"""Pairs in turns that did not count, from which on none is tried where none has counted."""
BUSY_AFTER = 6
"""From this many timed trials on, more disturbed than not means the machine is busy."""


class MachineBusyError(Exception):
    """More than half of the trials were disturbed: nothing can be decided here now."""


ENDS = (KeyboardInterrupt, MachineBusyError)
"""What ends a tuning early: what it has found so far is kept, and `stop_of` says which it was."""


def stop_of(end: BaseException) -> str:
    """Return what `Ablation.stopped` says of it.

    >>> stop_of(KeyboardInterrupt())
    'interrupted'
    """
    return "machine busy" if isinstance(end, MachineBusyError) else "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One thing to be run next."""

    kind: str
    """`time`: one timed trial. `look`: one trial with probes, which is not compared. `screen`: one
    process in which techniques are switched. `check`: the guard's judgement of a recipe. `wait`:
    until other processes leave the cores alone. `pair`: the next pair of two recipes, if another
    host has played it. `turns`: a pair whose two processes take turns."""
    recipe: Recipe = Recipe()
    name: str = ""
    """What is looked at, or which process of a screen."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How: what the methods of `TrialHistory` put there. Of a trial, fields of `TrialOptions`."""

    @property
    def key(self) -> str:
        """A text that equal experiments share.

        >>> Experiment(kind="screen", name="0").key
        'screen 0 []'
        """
        return " ".join(filter(None, (self.kind, self.name, key_of(self.recipe))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the guard says about a recipe, and about the unchanged script against itself."""

    check: LossCheck
    aa_check: LossCheck | None = None
    trial_s: float = 0.0
    """What one of its trials took: the longest of the latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One experiment with its result: a row of the journal."""

    key: str
    elapsed_s: float
    """Seconds of the budget that were used when it was over."""
    trial: Trial | None = None
    judgement: Judgement | None = None
    """Of a check; a wait has neither."""
    pair: tuple[Trial, ...] = ()
    """Of a pair, the base's trial first; the host that played it, if another one, is in their
    details."""

    def to_json(self) -> dict[str, Any]:
        """Return a plain JSON mapping."""
        plain: dict[str, Any] = {"key": self.key, "elapsed_s": self.elapsed_s}
        if self.trial is not None:
            plain["trial"] = self.trial.to_json()
        if self.judgement is not None:
            plain["judgement"] = to_plain(self.judgement)
        if self.pair:
            plain["pair"] = [trial.to_json() for trial in self.pair]
        return plain


def record_from_json(plain: Mapping[str, Any]) -> Record:
    """Return the record that `Record.to_json` wrote."""
    trial, judgement = plain.get("trial"), plain.get("judgement")
    return Record(
        key=str(plain["key"]),
        elapsed_s=float(plain["elapsed_s"]),
        trial=trial_from_json(trial) if trial else None,
        judgement=from_plain(Judgement, judgement) if judgement else None,
        pair=tuple(map(trial_from_json, plain.get("pair", ()))),
    )


Asking = Generator[Experiment, Record, T]
"""Asks for experiments, is sent their records, and returns what followed from them."""


@dataclass(slots=True, kw_only=True)
class Budget:
    """The time a tuning may take."""

    total_s: float
    elapsed_s: float = 0.0
    """Of the latest record."""

    @property
    def left_s(self) -> float:
        """Seconds left; negative once the budget is overdrawn."""
        return self.total_s - self.elapsed_s


@dataclass(slots=True, kw_only=True)
class TrialHistory:
    """What the experiments so far have shown, and how to ask for the next one."""

    machine: Machine
    budget: Budget = field(default_factory=lambda: Budget(total_s=math.inf))
    accepts_load: bool = False
    hosts: int = 1
    """On which pairs may be played, this one among them."""
    takes_turns: bool = False
    """Whether the two processes of a pair may take turns."""
    floor: Recipe = Recipe()
    """What takes the unchanged script's place where that does not run."""
    step_s: dict[str, list[float]] = field(default_factory=dict)
    """Step times of accepted timed trials, by recipe, those of another host by its name too."""
    missed_turns: int = 0
    """Pairs in turns that did not count."""
    turned: dict[str, list[float]] = field(default_factory=dict)
    """Log ratios of the pairs in turns that count, by the two recipes."""
    elsewhere: dict[str, int] = field(default_factory=dict)
    """Pairs that count and were played on other hosts, by host."""
    wall_s: dict[str, float] = field(default_factory=dict)
    """Wall time of the latest trial, by key."""
    latest: Trial | None = None
    """The trial that ran last, where it was the base of a comparison."""
    timed: int = 0
    disturbed: int = 0
    lost_s: float = 0.0
    """Time that went into disturbed trials, and into waiting for quiet."""
    foreign_shares: list[float] = field(default_factory=list)
    """Part of the cores that other processes used during each timed trial."""
    weaker: dict[str, str] = field(default_factory=dict)
    """Techniques that missed their own promise, and the one that they keep here."""
    aa_check: LossCheck | None = None
    checked: dict[str, LossCheck] = field(default_factory=dict)
    """What the guard said, by recipe."""
    guard_s: float = 0.0
    """What one of the guard's trials took at its latest check."""
    kernels: dict[str, Profile] = field(default_factory=dict)
    """The profile of each recipe's traced trial: what a device runs is looked at once."""

    def _ask(self, experiment: Experiment) -> Asking[Record]:
        before_s = self.budget.elapsed_s
        record = yield experiment
        self.budget.elapsed_s = record.elapsed_s
        if experiment.kind == "wait":
            self.lost_s += record.elapsed_s - before_s
        if record.trial is not None:
            self.wall_s[experiment.key] = record.trial.wall_s
        if record.trial is None or record.trial.outcome is not Outcome.REFUSED:
            self.latest = None  # those that refuse are over at once
        return record

    def _trial(self, experiment: Experiment) -> Asking[Trial]:
        record = yield from self._ask(experiment)
        assert record.trial is not None
        return record.trial

    def time(self, recipe: Recipe, *, must_apply: bool = False) -> Asking[Trial]:
        """Ask for one timed trial, again where other work disturbed it.

        With `must_apply` the trial ends early where a technique refuses.

        Raises:
            MachineBusyError: if most trials are disturbed and that is not accepted.
        """
        for _ in range(MAX_ACCEPTED_REPEATS if self.accepts_load else MAX_REPEATS):
            traces = key_of(recipe) not in self.kernels
            options = {"ends_when_refused": must_apply, "traces_kernels": traces}
            experiment = Experiment(kind="time", recipe=recipe, options=options)
            trial = self._with_kernels((yield from self._trial(experiment)))
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
            is_last = self.budget.left_s <= 0 or (self.accepts_load and is_busy)
            # One that counts all the same took as much longer as others took of the cores.
            lost_share = foreign_share_of(trial) if self.accepts_load and is_last else 1.0
            self.lost_s += lost_share * trial.wall_s
            if is_busy and not self.accepts_load:
                raise MachineBusyError
            if is_last:
                break
            if not self.accepts_load:
                yield from self._ask(Experiment(kind="wait", options={"most_s": MOST_WAIT_S}))
        if self.accepts_load and trial.profile is not None:
            self._keep_time(recipe, trial.profile)
        return trial

    def _with_kernels(self, trial: Trial) -> Trial:
        """Return a timed trial with what the device was seen to run under its recipe.

        To start the profiler and read its trace takes seconds, and any timed trial may become the
        one whose profile says what to try next; both sides of a pair have to be described alike.
        """
        if trial.profile is None:
            return trial
        seen = self.kernels.setdefault(key_of(trial.recipe), trial.profile)
        return replace(trial, profile=with_kernels_of(trial.profile, seen))

    def _keep_time(self, recipe: Recipe, profile: Profile, host: str = "") -> None:
        key = f"{host} {key_of(recipe)}".lstrip()
        self.step_s.setdefault(key, []).append(profile.whole_step_ms / 1e3)

    def played_elsewhere(
        self, base: Recipe, candidate: Recipe, *, starts_with_base: bool, most: int
    ) -> Asking[tuple[Trial, ...]]:
        """Return the two trials of the next pair where another host played it; else none.

        Then it is played here, in the order that is given, and other hosts begin meanwhile on the
        pairs after it, as many as may be wanted at `most`.
        """
        if self.hosts == 1:
            return ()
        latest = self.latest
        options = {"base": base, "starts_with_base": starts_with_base, "most": most}
        asked = Experiment(kind="pair", recipe=candidate, name=key_of(base), options=options)
        pair = (yield from self._ask(asked)).pair
        if not pair:
            self.latest = latest  # nothing ran here since
            return ()
        for trial in pair:
            assert trial.profile is not None
            self.timed += 1
            self.foreign_shares.append(foreign_share_of(trial))
            self._keep_time(trial.recipe, trial.profile, trial.details["host"])
        host = pair[0].details["host"]
        self.elsewhere[host] = self.elsewhere.get(host, 0) + 1
        seen = self.kernels.keys()
        return tuple(self._with_kernels(t) if key_of(t.recipe) in seen else t for t in pair)

    def in_turns(
        self, base: Recipe, candidate: Recipe, *, starts_with_base: bool
    ) -> Asking[tuple[Trial, ...]]:
        """Ask for a pair whose two processes take turns; none where that does not work."""
        if not self.takes_turns or max(base.num_ranks, candidate.num_ranks) > 1:
            return ()
        options = {"base": base, "starts_with_base": starts_with_base}
        asked = Experiment(kind="turns", recipe=candidate, name=key_of(base), options=options)
        pair = (yield from self._ask(asked)).pair
        self.missed_turns += not pair
        if self.missed_turns >= MOST_MISSED and not self.turned:
            self.takes_turns = False
        for trial in pair:
            key = f"time {key_of(trial.recipe)}"
            # Each waited while the other one ran, and for its start-up: to compile takes both long.
            wall_s = max(each.wall_s for each in pair) / len(pair)
            self.wall_s[key] = min(self.wall_s.get(key, math.inf), wall_s)
            if trial.profile is not None:
                self.timed += 1
                self.foreign_shares.append(foreign_share_of(trial))
                self._keep_time(trial.recipe, trial.profile, "in turns")
        return pair

    def again(self, recipe: Recipe) -> Asking[Trial]:
        """Return the trial of this recipe that ran last of all, as a base; else time it again."""
        latest, self.latest = self.latest, None
        if latest is not None and key_of(latest.recipe) == key_of(recipe):
            return latest
        return (yield from self.time(recipe))

    def look(
        self, what: str, recipe: Recipe, probes: Mapping[str, Any], steps: int | None
    ) -> Asking[Trial]:
        """Ask for one trial that is not compared; `probes` and `steps` as in `TrialOptions`."""
        options = {"probes": probes, "steps": steps}
        return self._trial(Experiment(kind="look", recipe=recipe, name=what, options=options))

    def screen(
        self, recipe: Recipe, options: Mapping[str, Any], number: int, limit_s: float
    ) -> Asking[Trial]:
        """Ask for process `number` of a screen: techniques are switched on top of a recipe.

        `options` are those of `flatout.agent.probes.screen`; after `limit_s` its log is what stays.
        """
        asked = {"probes": {"screen": options}, "steps": ENDLESS, "limit_s": limit_s}
        return self._trial(
            Experiment(kind="screen", recipe=recipe, name=str(number), options=asked)
        )

    def check(self, recipe: Recipe) -> Asking[LossCheck]:
        """Ask the guard whether a recipe still trains the same thing."""
        key = key_of(recipe)
        if key not in self.checked:
            options = {"floor": self.floor, "weaker": dict(self.weaker)}
            asked = Experiment(kind="check", recipe=recipe, options=options)
            judgement = (yield from self._ask(asked)).judgement
            assert judgement is not None
            self.aa_check = judgement.aa_check or self.aa_check
            self.guard_s = judgement.trial_s or self.guard_s
            self.checked[key] = judgement.check
        return self.checked[key]

    def cost_s(self, recipe: Recipe, default: float) -> float:
        """Return what one timed trial of this recipe takes, as far as is known."""
        return self.wall_s.get(f"time {key_of(recipe)}", default)

    def guard_cost_s(self, default: float) -> float:
        """Return what one of the guard's trials takes, as far as is known."""
        return self.guard_s or default


def key_of(recipe: Recipe) -> str:
    """Return a text that equal recipes share."""
    return json.dumps(
        [[c.technique, dict(c.settings)] for c in recipe.choices], sort_keys=True, default=str
    )


def disturbances(
    trial: Trial, profile: Profile, machine: Machine, *, in_turns: bool = False
) -> str:
    """Return how other work on the machine or on its device spoilt a trial, "" if none did.

    What other virtual machines take makes these cores slower, for both sides of a pair in turns.
    Other processes here take one core of several: with that another recipe may be the faster one.
    """
    load = trial.details.get("load", {})
    if in_turns:
        load = {**load, "steal_share": 0.0}
    found = disturbance.of_load(load, profile, machine) or disturbance.of_device(profile.gpu)
    return "; ".join(found)


def foreign_share_of(trial: Trial) -> float:
    """Return the part of the cores that other processes used during a trial."""
    return float(trial.details.get("load", {}).get("foreign_share", 0.0))
