"""A Regime: what bounds the step, and what each part of it could give at most."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CAUSES = ("input", "sync", "communication", "launch", "gemm", "bandwidth", "compute", "other")
"""What a step may wait for. `compute` is what could not be split into the three before it, `other`
the loop's own code."""
LEAST_LEFT = 1e-3
"""Smallest share of the step that is taken to remain: no clock here tells less from nothing, and
reports show what follows as more than a thousand times."""


def most_times(share: float) -> float:
    """Return how many times faster a step could be at most, took a share of it no time (Amdahl).

    >>> most_times(0.5), most_times(0.0)
    (2.0, 1.0)
    """
    return 1 / min(1.0, max(LEAST_LEFT, 1 - share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Shares of the step by what bounds them; they add up to at most 1."""

    name: str
    """The cause with the largest share, one of `CAUSES`."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the step by cause; a cause that was not looked for is absent."""
    evidence: tuple[str, ...] = ()
    """One sentence a cause: where its share comes from."""
    amdahl: Mapping[str, float] = field(default_factory=dict)
    """How many times faster the step could be at most, were a phase free; by phase."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Causes whose share is not known, each with what would tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The best case of one lever: everything that it acts on takes no time."""

    ratio: float
    """Step over step without it; infinite where nothing bounds the lever."""
    share: float
    """Share of the step that the lever acts on."""
    why: str


def regime_from_json(plain: Mapping[str, Any]) -> Regime:
    """Return the regime that `dataclasses.asdict` wrote."""
    return Regime(**{**plain, "evidence": tuple(plain["evidence"])})
