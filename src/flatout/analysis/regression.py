"""Robust regression of a series of measurements whose level drifts.

Neighbours on the same host, a clock that steps up and down: what a machine can do wanders by 10 to
30 % within seconds where it is shared. Blocks that lie next to each other share that, so the level
is taken for a random walk with noise on top, as in field trials (Besag and Kempton, Statistical
Analysis of Field Experiments Using Neighbouring Plots, Biometrics 42, 1986). How far it wanders
is estimated by restricted maximum likelihood (Patterson and Thompson, Biometrika 58, 1971); the
whitened series is then fitted with Huber's weights (Huber, Robust Statistics, chapter 7).
"""

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
BEND = 1.345
"""Deviations beyond which a residual is bent: 95 % efficient where the noise is normal (Huber)."""
WALKS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Variances that are tried for what the level wanders from one measurement to the next, as shares
of the variance of the noise."""
SMALLEST = 1e-9
"""Deviation of a series that the columns explain as a whole."""
IS_DRIFT = 8.0
"""Twice the gain in log-likelihood from which there is a drift. The robust deviation wanders more
than theory has it: of series without a drift 8 % are taken to have one (simulated, 60 each)."""


def whitening(matrix: Array, y: Array, at: Array, parts: Array) -> Array | None:
    """Return what columns and series are multiplied by, `[n, n]`; None where nothing drifts.

    Args:
        matrix: Columns of the fit, `[n, p]`, among them one level for each part.
        y: The series, `[n]`.
        at: Time of each measurement, `[n]`, in any unit.
        parts: A number for each measurement, `[n]`: those of one part share a random walk.
    """
    covariance = _walks(at, parts)
    best, found = _likelihood(matrix, y) + IS_DRIFT / 2, None
    for share in WALKS if covariance.any() else ():
        white = np.linalg.inv(np.linalg.cholesky(np.eye(len(y)) + share * covariance))
        likelihood = _likelihood(white @ matrix, white @ y) + np.log(np.diag(white)).sum()
        if likelihood > best:
            best, found = likelihood, white
    return found


def _walks(at: Array, parts: Array) -> Array:
    """Return the covariance of random walks that each begin with their part's first measurement.

    Its unit is what a walk gains from one measurement to the next, in the middle.
    """
    is_same = parts[:, None] == parts
    since = at - np.where(is_same, at, np.inf).min(axis=1)
    steps = np.diff(np.unique(at))
    unit = np.median(steps) if len(steps) else 1.0
    return np.asarray(np.where(is_same, np.minimum.outer(since, since), 0.0) / unit, np.float64)


def _likelihood(matrix: Array, y: Array) -> float:
    """Return the restricted log-likelihood, with the residuals' robust deviation."""
    n, p = matrix.shape
    _, _, sd = huber(matrix, y)
    size = float(np.linalg.slogdet(matrix.T @ matrix)[1])
    return float(-size / 2 - (n - p) * math.log(max(sd, SMALLEST)))


def huber(matrix: Array, y: Array) -> tuple[Array, Array, float]:
    """Return coefficients, their covariance and the residuals' deviation, by reweighting."""
    n, p = matrix.shape
    weights = np.ones(n)
    for _ in range(50):
        root = np.sqrt(weights)
        coefficients = np.linalg.lstsq(matrix * root[:, None], y * root, rcond=None)[0]
        sizes = np.abs(y - matrix @ coefficients)
        # Of n residuals p may be next to nothing, whatever the noise: they are passed over.
        scale = max(float(np.median(np.sort(sizes)[p - 1 :])) / 0.6745, 1e-6)
        before, weights = weights, np.minimum(1.0, BEND * scale / np.maximum(sizes, 1e-12))
        if np.abs(before - weights).max() < 1e-6:
            break
    bent = np.minimum(sizes / scale, BEND)
    inner = max(float(np.mean(sizes < BEND * scale)), 0.1)
    correction = 1 + p / n * (1 - inner) / inner
    variance = (correction * scale / inner) ** 2 * float(np.sum(bent**2)) / (n - p)
    covariance = variance * np.linalg.inv(matrix.T @ matrix)
    return np.asarray(coefficients, np.float64), covariance, math.sqrt(variance)
