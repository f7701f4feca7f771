"""A Check: one thing that `doctor` looked at."""

from dataclasses import asdict, dataclass
from typing import Any

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

    def to_json(self) -> dict[str, Any]:
        """Return a plain JSON mapping."""
        return asdict(self)
