"""Which technique to try next: candidates for this profile on this machine, by hope per second.

A prediction counts for as much as those of its family were worth in this tuning so far, and for the
less the longer it takes to try it. That decides the order only: what is predicted to do nothing is
tried all the same, while there is time. Only what cannot help is left out: a technique that acts on
too small a share of the step.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from flatout.analysis.regime import best_case, is_hopeless
from flatout.records import catalogue
from flatout.records.machine import Machine
from flatout.records.messages import times, words
from flatout.records.profile import Bound, Profile
from flatout.records.recipe import Choice
from flatout.records.technique import Effect, Numerics, Technique, prior_for

WORTH_A_TRIAL = 1.02
"""A gain below this cannot pass the rule: what could bring no more at best is not tried."""
HIDDEN = "row.bound_in_noise"
"""What the message is called that noise would hide even the best case."""
TYPICAL_PAIRS = 3
"""Pairs that a candidate takes when it is clearly better or clearly not."""
TYPICAL_TURNED_PAIRS = 2
"""The same where the two processes of a pair take turns: what differs between them is then known
before the first pair. Fifteen comparisons of ordinary scripts took 2.3 in the mean."""
WARM_SHARE = 0.2
"""Start-up of a compiled trial once another one has filled the compile cache, as a share of the
first one's: 2 to 5 s of 15 to 19 s in the record of slow_compute."""
BELIEF = 0.25
"""Weight of a family's predictions before anything was measured, as a squared log ratio: outcomes
count as much once a gain of 1.65x was predicted."""
WORTH_TELLING = 1.15
"""Predicted ratio from which a technique that may not be tried is named."""
LEAST_TRUST, MOST_TRUST = 0.1, 1.5
"""Limits of that correction: a family that made things slower keeps a small hope."""
MAX_RATIO = 20.0
"""Predictions are capped: a step that is predicted to take no time at all is a wrong model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One technique with settings, and its predicted effect on top of the recipe so far."""

    choice: Choice
    numerics: Numerics
    effect: Effect
    ratio: float
    bound: Bound
    """The most it could bring, whatever was predicted."""
    family: str = ""
    cost_s: float = 1.0
    """What trying it takes."""
    trust: float = 1.0
    """What this tuning's own outcomes leave of the family's predicted log ratios."""
    deviation: float = 0.0
    """How far the log of the step's ratio may be off the predicted one: one standard deviation."""
    learned: float = 0.0
    """How far the log ratio is expected to be above the predicted one, from earlier tunings."""

    @property
    def hope(self) -> float:
        """The gain to be expected of a trial, in logs: what turns out slower is not kept.

        For a normal log ratio this is the expected improvement of Mockus (1978). A prediction of
        no gain that may be far off is worth a trial, a sure one is not.
        """
        mean = self.trust * math.log(self.ratio) + self.learned
        most = math.log(self.bound.ratio)
        if self.deviation <= 0:
            return min(max(0.0, mean), most)
        normal, z = NormalDist(), mean / self.deviation
        return min(mean * normal.cdf(z) + self.deviation * normal.pdf(z), most)

    @property
    def hope_per_s(self) -> float:
        """The same for each second of trying."""
        return self.hope / self.cost_s

    @property
    def is_promising(self) -> bool:
        """Whether a gain that can be shown is to be expected; the others are tried last."""
        return self.hope >= math.log(WORTH_A_TRIAL)

    def find_reason_against(self, smallest: float) -> str | None:
        """Return why it cannot help, given the smallest gain that could show, or None."""
        if self.effect.peak_bytes < 0 and self.ratio <= 1:
            return None  # offered where memory is tight: what it saves is worth knowing
        if is_hopeless(self.bound, WORTH_A_TRIAL):
            return self.bound.why
        if is_hopeless(self.bound, smallest):
            return words(HIDDEN, why=self.bound.why, ratio=times(smallest))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Which techniques may be tried at all."""

    machine: Machine
    ceiling: Numerics
    only: Collection[str] = ()
    skip: Collection[str] = ()

    def allows(self, name: str, promise: Numerics) -> bool:
        """Return whether a technique that makes this promise may be tried."""
        is_named = name not in self.skip and (not self.only or name in self.only)
        return is_named and self.ceiling.allows(promise)

    def kinds(self) -> dict[str, type[Technique]]:
        """Return the techniques that may be tried, by name."""
        known = {name: catalogue.technique_class(name) for name in catalogue.names()}
        return {name: kind for name, kind in known.items() if self.allows(name, kind.numerics)}


def typical_pairs(*, in_turns: bool) -> int:
    """Return the pairs that a candidate takes when it is clearly better or clearly not."""
    return TYPICAL_TURNED_PAIRS if in_turns else TYPICAL_PAIRS


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What a tuning has learned about its own predictions and trials."""

    outcomes: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """By family: predicted and measured ratio of each technique that was tried on its own."""
    trial_s: float = 10.0
    """Wall time of one trial of the recipe so far."""
    pairs: int = TYPICAL_PAIRS
    """What a candidate takes of them."""
    errors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By technique: logs of measured over predicted ratios in earlier tunings on this machine."""

    def learned(self, technique: str) -> float:
        """Return the mean error of a technique's predictions; the prior counts as one tuning.

        >>> Experience(errors={"x": [0.2, 0.4]}).learned("x")
        0.2
        """
        errors = self.errors.get(technique, ())
        return round(sum(errors) / (1 + len(errors)), 9)

    def trust_in(self, family: str) -> float:
        """Return the slope of measured against predicted log ratios, drawn towards 1.

        >>> Experience(outcomes={"data": [(3.3, 1.1)]}).trust_in("data") < 0.3
        True
        >>> Experience().trust_in("data")
        1.0
        """
        logs = [(math.log(p), math.log(m)) for p, m in self.outcomes.get(family, ())]
        squares = BELIEF + sum(predicted**2 for predicted, _ in logs)
        slope = (BELIEF + sum(predicted * measured for predicted, measured in logs)) / squares
        return min(MOST_TRUST, max(LEAST_TRUST, slope))

    def cost_s(self, family: str, startup_s: float) -> float:
        """Return what trying a technique takes: the trials of both sides, and its start-ups."""
        later = WARM_SHARE if family == "compile" else 1.0
        starts = 1 + later * (self.pairs - 1)
        return 2 * self.pairs * self.trial_s + starts * max(0.0, startup_s)


def rank(
    profile: Profile, search: Search, experience: Experience = Experience()
) -> list[Candidate]:
    """Return the candidates of every allowed technique, the most gain per second first."""
    found = [
        candidate_of(name, option, profile, search.machine, experience)
        for name, kind in search.kinds().items()
        for option in kind.candidates(profile, search.machine)
    ]
    return sorted(found, key=lambda candidate: (-candidate.hope_per_s, -candidate.ratio))


def find_beyond(
    profile: Profile, search: Search, experience: Experience = Experience()
) -> Candidate | None:
    """Return the change of the data that `--numerics` keeps out and that promises most.

    That of batches and of their order: other techniques that change the training train another
    model, or with other numbers. None where it promises little, or names are given.
    """
    if search.only:
        return None
    everything = rank(profile, replace(search, ceiling=Numerics.TRAINING), experience)
    beyond = [x for x in everything if x.family == "data" and not search.ceiling.allows(x.numerics)]
    worth_it = [x for x in beyond if x.ratio >= WORTH_TELLING]
    return max(worth_it, key=lambda x: x.ratio, default=None)


def find_companion(
    before: Profile, after: Profile, candidate: Candidate, search: Search
) -> Candidate | None:
    """Return the technique that a candidate on its own made worth trying, if there is one.

    Workers on a machine without a free core wait for the training's threads: only both techniques
    together help, and one at a time neither would be kept.
    """
    known = {found.choice.label for found in rank(before, search)}
    for found in rank(after, search):
        is_new = found.choice.label not in known
        if is_new and found.choice.technique != candidate.choice.technique:
            return found if found.is_promising else None
    return None


def find_pair(profile: Profile, search: Search, experience: Experience) -> list[Candidate]:
    """Return workers and the fewer threads that a scan saw to be best together; often none.

    What both bring is the second one's prediction: on their own workers without a core bring
    little, and fewer threads without workers less than nothing.
    """
    scan = profile.worker_scan
    pace = scan.best_pair if scan else None
    if scan is None or pace is None or pace.num_workers in (scan.now, 0):
        return []
    wanted = {
        catalogue.setter_of("num_workers"): {
            "num_workers": pace.num_workers,
            "prefetch_factor": pace.prefetch_factor,
        },
        catalogue.setter_of("threads"): {"threads": pace.threads},
    }
    found = []
    for name, settings in wanted.items():
        kind = catalogue.technique_class(name)
        if not search.allows(name, kind.numerics):
            return []
        option = kind(**settings)
        found.append(candidate_of(name, option, profile, search.machine, experience))
    workers, threads = found
    both = min(scan.gain(pace), workers.bound.ratio)
    alone = min(workers.ratio, both)
    return [replace(workers, ratio=alone), replace(threads, ratio=both / alone)]


def candidate_of(
    name: str,
    option: Technique,
    profile: Profile,
    machine: Machine,
    experience: Experience = Experience(),
) -> Candidate:
    """Return a technique with what it is predicted to bring on top of what was profiled."""
    effect = option.predict(profile, machine)
    bound = best_case(profile, option.addresses)
    step_ms = profile.whole_step_ms
    after_ms = max(step_ms + effect.step_ms, step_ms / MAX_RATIO)
    return Candidate(
        choice=Choice(technique=name, settings=option.settings()),
        numerics=option.numerics,
        effect=effect,
        ratio=min(step_ms / after_ms, bound.ratio),
        bound=bound,
        family=option.family,
        cost_s=experience.cost_s(option.family, effect.startup_s),
        trust=experience.trust_in(option.family),
        deviation=math.log(prior_for(option, profile).spread) * min(1.0, bound.share),
        learned=experience.learned(name),
    )
