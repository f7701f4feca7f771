"""A Contrast: two stored results, side by side."""

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "flatout.contrast/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number of both results."""

    name: str
    baseline: float
    candidate: float
    unit: str
    """`ms`, `per_s`, `share`, `bytes` or `ratio`: how the numbers are to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """What the second of two results shows against the first."""

    of: str
    """`profile` or `ablation`: what both files hold."""
    ratio: float
    """Above 1 the candidate is better: it steps faster (profiles), its recipe gains more
    (ablations)."""
    meaning: str
    """What the ratio is a ratio of, in words."""
    interval: tuple[float, float] | None = None
    """95 % interval of the ratio; None where the results hold no repeats."""
    n: tuple[int, int] = (1, 1)
    """Processes (profiles) or pairs (ablations) behind the ratio: baseline, candidate."""
    quantities: tuple[Quantity, ...] = ()
    notes: tuple[str, ...] = ()
    """What the reader should know before trusting the ratio."""

    @property
    def covers_one(self) -> bool:
        """Whether the two cannot be told apart."""
        return self.interval is not None and self.interval[0] <= 1.0 <= self.interval[1]

    def to_json(self) -> dict[str, Any]:
        """Return the `flatout.contrast/1` mapping."""
        return {"schema": SCHEMA} | asdict(self)
