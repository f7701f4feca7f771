"""Progress: what a long verb tells while it works."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One moment of a tuning."""

    trying: str
    """What is being tried now, in words."""
    done_share: float
    """Share of the budget that is spent, in [0, 1]."""
    elapsed_s: float
    left_s: float
    best_ratio: float = 1.0
    """Product of the ratios of the levers kept so far."""
    event: str = ""
    """A line worth keeping on the screen: a verdict, a repeated trial; empty for a mere tick."""
