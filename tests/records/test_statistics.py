"""The rule that decides when a change is faster."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from flatout.records.statistics import (
    Decision,
    InProcess,
    Prior,
    Rule,
    compare,
    compare_apart,
    decide,
    gather,
    prior_of,
    student_cdf,
    student_quantile,
)

QUIET = [1.0, 1.01, 0.99, 1.005, 0.995, 1.0]


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 10, 31])
@pytest.mark.parametrize("confidence", [0.95, 0.975, 0.998])
def test_quantile_agrees_with_scipy(freedom, confidence):
    ours = student_quantile(confidence, freedom)

    assert ours == pytest.approx(scipy_stats.t.ppf(confidence, freedom), rel=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 5, 8])
@pytest.mark.parametrize("t", [-3.0, 0.0, 0.7, 12.0])
def test_distribution_function_agrees_with_scipy(freedom, t):
    assert student_cdf(t, freedom) == pytest.approx(scipy_stats.t.cdf(t, freedom), rel=1e-9)


def test_clear_gain_is_kept_after_two_pairs_once_the_noise_is_known():
    evidence = gather([1.0, 1.01], [0.75, 0.76], prior_of([QUIET]))

    assert decide(evidence) is Decision.KEPT


def test_two_pairs_without_known_noise_decide_nothing():
    evidence = gather([1.0, 1.01], [0.5, 0.505])

    assert decide(evidence) is Decision.UNDECIDED


def test_equal_times_have_no_effect():
    evidence = gather([1.0, 1.001, 0.999], [1.0, 0.999, 1.001], prior_of([QUIET]))

    assert decide(evidence) is Decision.NO_EFFECT


def test_slower_candidate_is_worse():
    evidence = gather([1.0, 1.0, 1.0], [1.3, 1.31, 1.29], prior_of([QUIET]))

    assert decide(evidence) is Decision.WORSE


def test_one_pair_without_known_noise_has_no_interval():
    evidence = gather([1.0], [0.5])

    assert compare(evidence).interval == (0.0, math.inf)


def test_candidate_with_noise_of_its_own_overrules_the_prior():
    prior = prior_of([QUIET])
    evidence = gather([1.0, 1.0, 1.0], [0.5, 1.0, 0.8], prior)

    assert prior.freedom == 5
    assert not evidence.has_prior


def test_few_trials_are_no_prior():
    assert prior_of([[1.0, 1.1], [2.0]]) == Prior()


def test_prior_pools_the_spread_within_recipes_only():
    apart = prior_of([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])

    assert apart.variance == pytest.approx(0.0)
    assert apart.freedom == 4


def false_accepts(pair_sd, runs, seed, ratio=1.0):
    """Return how many of `runs` tunings with this noise keep a candidate of that true ratio."""
    rng = np.random.default_rng(seed)
    rule, kept = Rule(), 0
    for _ in range(runs):
        noise = np.exp(rng.normal(0, pair_sd / math.sqrt(2), size=(26,)))
        prior = prior_of([noise[20:]])
        for n in range(1, rule.max_pairs + 1):
            decision = decide(gather(noise[:n], noise[10 : 10 + n] / ratio, prior))
            if decision is not Decision.UNDECIDED:
                break
        kept += decision is Decision.KEPT
    return kept


@pytest.mark.parametrize("pair_sd", [0.01, 0.035, 0.10])
def test_equal_recipes_are_called_faster_at_most_once_in_a_hundred(pair_sd):
    assert false_accepts(pair_sd, runs=1000, seed=7) <= 10


def test_a_real_gain_is_found():
    assert false_accepts(0.035, runs=200, seed=7, ratio=1.3) == 200


def test_times_measured_apart_have_welchs_interval():
    base, candidate = [2.0, 2.1, 1.9, 2.05], [1.0, 1.02, 0.97]

    pair = compare_apart(base, candidate)

    found = scipy_stats.ttest_ind(np.log(base), np.log(candidate), equal_var=False)
    # Whole degrees of freedom, rounded down: never narrower than scipy's.
    low, high = np.exp(found.confidence_interval(0.95))
    assert pair.ratio == pytest.approx(np.exp(np.mean(np.log(base)) - np.mean(np.log(candidate))))
    assert 0.98 * low < pair.interval[0] <= low
    assert high <= pair.interval[1] < 1.02 * high


def test_equal_processes_are_told_apart_in_one_of_twenty():
    rng = np.random.default_rng(5)
    noise = np.exp(rng.normal(0, 0.05, size=(1000, 6)))

    missed = sum(not compare_apart(row[:3], row[3:]).covers_one for row in noise)

    assert missed <= 70


def test_one_pair_that_is_plainly_no_gain_is_given_up_where_no_noise_is_known():
    assert decide(gather([1.0], [1.5])) is Decision.NO_EFFECT
    assert decide(gather([1.0], [1.2])) is Decision.UNDECIDED


def test_two_pairs_that_contradict_each_other_give_nothing_up():
    assert decide(gather([1.0, 1.0], [1.1, 2.0])) is Decision.UNDECIDED


def screened(ratio, error=0.02):
    return InProcess(log_ratio=math.log(ratio), error=error, freedom=15, n=12)


def test_a_screen_that_agrees_narrows_what_noisy_pairs_say():
    base, candidate = [1.0, 1.1, 0.9, 1.05], [0.85, 0.95, 0.7, 0.93]

    alone = compare(gather(base, candidate))
    both = compare(gather(base, candidate, in_process=screened(1.2)))

    assert (alone.blocks, both.blocks, both.n) == (0, 12, 4)
    assert both.interval[0] > alone.interval[0]
    assert both.interval[1] < alone.interval[1]


def test_pairs_that_contradict_a_screen_count_alone():
    base, candidate = [1.0, 1.01, 0.99], [1.0, 1.0, 1.0]

    seen = screened(1.5)

    assert compare(gather(base, candidate, in_process=seen)) == compare(gather(base, candidate))


def test_a_screen_proves_nothing_without_pairs_that_know_their_noise():
    assert decide(gather([1.0], [0.5], in_process=screened(2.0))) is Decision.UNDECIDED
    assert decide(gather([1.0, 1.0], [0.5, 0.5], in_process=screened(2.0))) is Decision.UNDECIDED


@pytest.mark.parametrize(("noise", "carries"), [(0.07, 0.0), (0.15, 0.05), (0.25, 0.05)])
def test_what_a_screen_chose_is_seldom_kept_without_a_gain(noise, carries):
    kept = sum(raced(0.0, noise, carries, seed) is Decision.KEPT for seed in range(2000))

    assert kept <= 10, "half a percent"


def test_a_gain_that_the_noise_of_processes_hides_is_found_with_the_screen():
    kept = sum(raced(math.log(1.2), 0.15, 0.0, seed) is Decision.KEPT for seed in range(200))
    without = sum(
        raced(math.log(1.2), 0.15, 0.0, seed, counts=False) is Decision.KEPT for seed in range(200)
    )

    assert kept >= 180
    assert without <= 130


def raced(log_ratio, noise, carries, seed, *, counts=True):
    """Return what is decided on a recipe that a screen chose; undecided where it did not."""
    rng, rule, error = np.random.default_rng(seed), Rule(), 0.03
    seen = log_ratio + rng.normal(0, carries) + rng.normal(0, error)
    if seen < student_quantile(0.9, 15) * error:
        return Decision.UNDECIDED
    in_process = InProcess(log_ratio=seen, error=error, freedom=15, n=12) if counts else None
    pairs = rng.normal(log_ratio, noise, size=rule.max_pairs)
    for n in range(rule.min_pairs_without_prior, rule.max_pairs + 1):
        found = gather(np.exp(pairs[:n]), np.ones(n), rule=rule, in_process=in_process)
        decision = decide(found, rule)
        if decision is not Decision.UNDECIDED:
            return decision
        if n >= rule.patience and found.estimate[0] < math.log(rule.promising):
            break
    return Decision.UNDECIDED
