"""Robust regression of series whose level drifts, against series whose truth is known."""

import math

import numpy as np
import pytest

from flatout.analysis.regression import huber, whitening
from flatout.records.statistics import student_quantile

N = 60


def series(seed, *, walk=0.0, noise=0.02, outliers=0.0, parts=1):
    """Return columns, a series and the numbers of its parts; the one effect of it is 0.1."""
    deal = np.random.default_rng(seed)
    is_on = deal.permutation(np.arange(N) % 2).astype(float)
    number = np.arange(N) * parts // N
    level = np.concatenate(
        [np.cumsum(deal.normal(0, walk, (number == part).sum())) for part in range(parts)]
    )
    y = 0.1 * is_on + level + number + deal.normal(0, noise, N) + 0.5 * (deal.random(N) < outliers)
    levels = [(number == part).astype(float) for part in range(parts)]
    return np.column_stack([*levels, is_on]), y, number


def fitted(matrix, y, parts, *, takes_drift_off=True):
    """Return the effect with half its 95 % interval."""
    drift = whitening(matrix, y, np.arange(N) * 0.4, parts) if takes_drift_off else None
    white = np.eye(N) if drift is None else drift
    coefficients, covariance, _ = huber(white @ matrix, white @ y)
    freedom = N - matrix.shape[1] - (drift is not None)
    return coefficients[-1], student_quantile(0.975, freedom) * math.sqrt(covariance[-1, -1])


def test_a_level_that_stays_is_no_drift():
    found = [whitening(*series(seed)[:2], np.arange(N), np.zeros(N)) for seed in range(40)]

    assert sum(white is not None for white in found) <= 10


def test_measurements_at_one_moment_have_no_drift():
    matrix, y, parts = series(0, walk=0.1)

    assert whitening(matrix, y, np.zeros(N), parts) is None


@pytest.mark.parametrize("about", [{}, {"outliers": 0.05}, {"parts": 2}, {"walk": 0.0}])
def test_intervals_hold_what_they_promise(about):
    found = [fitted(*series(seed, **{"walk": 0.05, **about})) for seed in range(100)]

    held = sum(abs(effect - 0.1) < half for effect, half in found)
    assert held >= 88  # of 100, 95 of them on average


@pytest.mark.parametrize("about", [{}, {"outliers": 0.05}, {"parts": 2}])
def test_what_drifts_is_in_no_interval(about):
    columns = [series(seed, walk=0.1, **about) for seed in range(20)]

    narrow = np.median([fitted(*each)[1] for each in columns])
    wide = np.median([fitted(*each, takes_drift_off=False)[1] for each in columns])

    assert 2.5 * narrow < wide
