"""A Check: one thing that `doctor` looked at.

A Finding: one bottleneck, with the numbers that prove it.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One bottleneck seen in a profile."""

    code: str
    """Stable name, equal to the rule's file name. Code compares this."""
    share: float
    """Fraction of step time lost to it, in [0, 1]; see `of` for the exceptions."""
    because: str
    """One sentence with the measured numbers."""
    next: str
    """What to do about it: one sentence, a command where there is one."""
    evidence: dict[str, float] = field(default_factory=dict)
    """The numbers behind `because`, keyed by metric name."""
    of: str = "step"
    """What `share` is a fraction of: `step`; `memory`: what 1,000 steps add to it; `device`: the
    memory of the device."""
    is_bound: bool = False
    """Whether `share` is only known not to be exceeded: the cause is some part of it."""


OK = "ok"
WARN = "warn"
"""Training works, slower or with a risk."""
BAD = "bad"
"""Training fails, or lands where it should not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found about one thing, why it matters and what to do."""

    status: str
    """`ok`, `warn` or `bad`."""
    what: str
    """The reading, in one line with its numbers."""
    why: str = ""
    """What it means for training; empty when all is well."""
    next: str = ""
    """What to do: one sentence, a command where there is one."""
