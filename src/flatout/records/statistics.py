"""When is a change faster? Paired logs of trial times, a t interval, a look after every pair.

The process is the unit of noise: equal trials in fresh processes differ by 2 to 7 %, and more
steps per trial change nothing. So a trial contributes one number, and an interval is built from
pairs of trials. The rule and its error rates come from the project's calibration on 112 quiet A/A
processes and 40,000 simulated runs per noise level (`docs/statistics.md`).
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from flatout.records.ablation import Comparison

CARRIES_OVER = 0.05
"""Standard deviation of what a ratio inside one process leaves out of that between fresh ones, in
logs. Where both are measured they are to agree within 3 % in the middle, which this doubles."""
CONTRADICTS = 3.0
"""Standard errors by which the two differ before the pairs alone count."""


class Decision(Enum):
    """What the pairs so far allow to say."""

    KEPT = "kept"
    NO_EFFECT = "no_effect"
    WORSE = "worse"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The calibrated sequential rule."""

    gain: float = 1.02
    """A smaller gain is not worth keeping."""
    keep_confidence: float = 0.998
    """One-sided; false accepts at a true ratio of 1.00 are 0.05 to 0.4 %."""
    drop_confidence: float = 0.95
    """One-sided, for giving a technique up."""
    min_pairs: int = 2
    min_pairs_without_prior: int = 3
    """Where no baseline noise is known yet."""
    min_pairs_to_drop: int = 1
    """Pairs before a technique that shows the opposite of a gain is given up."""
    hopeless: float = 0.75
    """One pair below this is no gain where no noise is known yet: three deviations of the noisiest
    pairs that were seen (10 %) below no difference."""
    max_pairs: int = 10
    at_least: int = 1
    """Pairs that are played even where fewer would decide: a confirmation asks for more."""
    looks_ahead: bool = False
    """Whether to set a technique aside once the pairs still allowed would leave it undecided, were
    they like those played: it is left for a comparison with more pairs, or together with others."""
    patience: int = 4
    """Pairs after which a gain that is not `promising` is set aside as inconclusive."""
    promising: float = 1.05
    """A mean ratio above this is pursued to the last pair."""
    min_prior_trials: int = 6
    """Baseline trials before their variance is pooled."""
    spread_limit: float = 4.0
    """A candidate whose pair variance exceeds the prior's by this factor has noise of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """What one process that switched between the two recipes showed of their ratio."""

    log_ratio: float
    error: float
    """Its standard error inside that process."""
    freedom: int
    n: int
    """Blocks of steps."""

    @property
    def variance(self) -> float:
        """Of the log ratio, taken for that between fresh processes."""
        return self.error**2 + CARRIES_OVER**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the pairs of one comparison say, as logs, and what was seen inside one process."""

    mean: float
    """Mean of ln(base / candidate): above 0 the candidate is faster."""
    variance: float
    """Variance of one pair, pooled with the workload's own baseline trials."""
    freedom: int
    n: int
    has_prior: bool = False
    in_process: InProcess | None = None

    @property
    def agreeing(self) -> InProcess | None:
        """What was seen inside one process, unless the pairs contradict it or know no noise yet."""
        seen, own = self.in_process, self.variance / self.n
        if seen is None or self.freedom < 1 or own <= 0:
            return None
        is_near = abs(self.mean - seen.log_ratio) <= CONTRADICTS * math.sqrt(own + seen.variance)
        return seen if is_near else None

    @property
    def estimate(self) -> tuple[float, float, int]:
        """The log ratio, its variance and its degrees of freedom, of all that counts.

        Both sources are weighted by the inverse of their variances; the degrees of freedom are
        Welch's and Satterthwaite's for such a sum.
        """
        own, seen = self.variance / self.n, self.agreeing
        if seen is None:
            return self.mean, own, self.freedom
        weights = 1 / own, 1 / seen.variance
        total = sum(weights)
        freedom = total**2 / (weights[0] ** 2 / self.freedom + weights[1] ** 2 / seen.freedom)
        mean = (weights[0] * self.mean + weights[1] * seen.log_ratio) / total
        return mean, 1 / total, max(1, int(freedom))

    def bound(self, confidence: float, side: int) -> float:
        """Return the one-sided bound, `side` -1 for the lower and +1 for the upper one."""
        mean, variance, freedom = self.estimate
        if freedom < 1:
            return side * math.inf
        return mean + side * student_quantile(confidence, freedom) * math.sqrt(variance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is known about the noise before the first pair."""

    variance: float = 0.0
    """Variance of the log ratio of one pair."""
    freedom: int = 0


def prior_of(groups: Iterable[Sequence[float]], rule: Rule = Rule()) -> Prior:
    """Return the noise of a pair from trials outside it, grouped by recipe; empty when too few."""
    logs = [[math.log(value) for value in group] for group in groups]
    if sum(map(len, logs)) < rule.min_prior_trials:
        return Prior()
    freedom = sum(len(group) - 1 for group in logs if group)
    squares = sum(sum((x - statistics.fmean(group)) ** 2 for x in group) for group in logs if group)
    return Prior(variance=2 * squares / freedom, freedom=freedom) if freedom > 0 else Prior()


def gather(
    base_s: Sequence[float],
    candidate_s: Sequence[float],
    prior: Prior = Prior(),
    rule: Rule = Rule(),
    in_process: InProcess | None = None,
) -> Evidence:
    """Return the evidence of interleaved pairs of step times, in the order of the pairs."""
    differences = [
        math.log(base / candidate) for base, candidate in zip(base_s, candidate_s, strict=True)
    ]
    n = len(differences)
    mean = statistics.fmean(differences)
    squares = sum((d - mean) ** 2 for d in differences)
    counted = prior.freedom
    if counted and n >= 3 and squares / (n - 1) > rule.spread_limit * prior.variance:
        counted = 0
    freedom = counted + n - 1
    variance = (counted * prior.variance + squares) / freedom if freedom else math.inf
    return Evidence(
        mean=mean,
        variance=variance,
        freedom=freedom,
        n=n,
        has_prior=counted > 0,
        in_process=in_process,
    )


def decide(evidence: Evidence, rule: Rule = Rule()) -> Decision:
    """Return what the evidence allows to say; UNDECIDED asks for one more pair, if any is left."""
    fewest = rule.min_pairs if evidence.has_prior else rule.min_pairs_without_prior
    line = math.log(rule.gain)
    if evidence.n >= fewest and evidence.bound(rule.keep_confidence, -1) > line:
        return Decision.KEPT
    is_no_gain = evidence.bound(rule.drop_confidence, +1) < line
    if evidence.n < fewest:
        is_no_gain = _is_plainly_no_gain(evidence, rule)
    if not is_no_gain:
        return Decision.UNDECIDED
    # To call a technique slower is a claim too: it needs the confidence of one that is faster.
    is_slower = evidence.bound(rule.keep_confidence, +1) < 0
    return Decision.WORSE if is_slower else Decision.NO_EFFECT


def _is_plainly_no_gain(evidence: Evidence, rule: Rule) -> bool:
    """Return whether to give up at the first look; nothing is kept before its time."""
    if evidence.n < rule.min_pairs_to_drop:
        return False
    if evidence.has_prior:
        return evidence.bound(rule.drop_confidence, +1) < 0
    # Of two pairs that differ much one proves nothing: they wait for the third.
    return evidence.n == 1 and evidence.mean < math.log(rule.hopeless)


def can_decide(evidence: Evidence, rule: Rule) -> bool:
    """Return whether the pairs still allowed would decide, were they like those played.

    >>> noisy = Evidence(mean=0.05, variance=0.01, freedom=9, n=2, has_prior=True)
    >>> can_decide(noisy, Rule(max_pairs=4)), can_decide(noisy, Rule(max_pairs=100))
    (False, True)
    """
    more = max(0, rule.max_pairs - evidence.n)
    ahead = replace(evidence, n=evidence.n + more, freedom=evidence.freedom + more)
    return decide(ahead, rule) is not Decision.UNDECIDED


def compare(evidence: Evidence, rule: Rule = Rule()) -> Comparison:
    """Return the ratio with its 95 % interval, for reports."""
    if evidence.freedom < 1:
        low, high = 0.0, math.inf
    else:
        low = math.exp(evidence.bound(0.975, -1))
        high = math.exp(evidence.bound(0.975, +1))
    seen = evidence.agreeing
    return Comparison(
        ratio=math.exp(evidence.estimate[0]),
        interval=(low, high),
        n=evidence.n,
        blocks=seen.n if seen else 0,
        resolution=resolution(evidence.variance, rule),
    )


def compare_apart(base: Sequence[float], candidate: Sequence[float]) -> Comparison:
    """Return the ratio of times, two or more of each, that were measured apart in fresh processes.

    Welch's interval: the two may come from other machines, with other noise. Changes between the
    two measurements (a warmer machine) are not in it, which interleaved pairs would cancel.
    """
    means, errors, squares = [], [], 0.0
    for times in (base, candidate):
        logs = [math.log(value) for value in times]
        error = statistics.variance(logs) / len(logs)
        means.append(statistics.fmean(logs))
        errors.append(error)
        squares += error**2 / (len(logs) - 1)
    freedom = max(1, int(sum(errors) ** 2 / squares)) if squares else len(base) + len(candidate) - 2
    middle = means[0] - means[1]
    width = student_quantile(0.975, freedom) * math.sqrt(sum(errors))
    return Comparison(
        ratio=math.exp(middle),
        interval=(math.exp(middle - width), math.exp(middle + width)),
        n=min(len(base), len(candidate)),
    )


def resolution(pair_variance: float, rule: Rule = Rule()) -> float:
    """Return the smallest ratio that ten pairs can show at this noise.

    >>> round(resolution(0.035**2), 3)
    1.075
    """
    return rule.gain * math.exp(1.5 * math.sqrt(pair_variance))


def student_cdf(t: float, freedom: int) -> float:
    """Return Student's t distribution function for whole degrees of freedom.

    Closed form: Abramowitz and Stegun, 26.7.3 (odd) and 26.7.4 (even).

    >>> round(student_cdf(2.0, 5), 6)
    0.94903
    """
    theta = math.atan(t / math.sqrt(freedom))
    cosine_squared = math.cos(theta) ** 2
    if freedom % 2:
        total, term = 0.0, math.cos(theta)
        for k in range(1, freedom, 2):
            total += term
            term *= cosine_squared * (k + 1) / (k + 2)
        area = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        total, term = 0.0, 1.0
        for k in range(0, freedom, 2):
            total += term
            term *= cosine_squared * (k + 1) / (k + 2)
        area = math.sin(theta) * total
    return 0.5 + area / 2


@lru_cache(maxsize=512)
def student_quantile(confidence: float, freedom: int) -> float:
    """Return the one-sided quantile of Student's t, by bisection.

    >>> round(student_quantile(0.975, 4), 4)
    2.7764
    """
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        if student_cdf(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return high
