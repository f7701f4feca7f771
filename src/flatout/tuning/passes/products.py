"""The products pass: every matrix product of a step, written down so that it can be repeated."""

from collections.abc import Mapping
from typing import Any

from flatout.records.errors import UserError
from flatout.records.messages import words
from flatout.tuning.passes import PassRunner, find_seen

STEPS = 4
"""Steps of the pass. The first may differ (lazy layers); the median of four does not show it."""


def look(runner: PassRunner) -> Mapping[str, Any]:
    """Return what the probe saw in a few steps of the workload."""
    trial = runner.run(words("progress.products"), {"products": {}}, steps=STEPS)
    seen = find_seen(trial, "products")
    if seen is None:
        errors = "; ".join(trial.details.get("errors", ()))
        raise UserError(
            f"the products of {runner.workload.command_line} were not seen: "
            f"{trial.message or errors or 'the probe failed'}"
        )
    return seen
