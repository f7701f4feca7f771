"""Names of the session's events, and small messages between parts of the script's process.

`listen` and `tell` are for steps made inside backward: who wants to see a gradient before it is
used up. `leave_note` tells the trial's folder what no result says.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EVENTS = (
    "epoch",
    "batch",
    "root",
    "forward",
    "forward_end",
    "loss",
    "backward",
    "backward_end",
    "before_step",
    "after_step",
    "lap",
    "segment",
    "segments",
    "skipping",
    "sampling",
    "enough",
    "stop",
)
"""Names that a listener may register for; see `flatout.agent.session.Session.on`. `lap`
comes as each segment ends, `segment` where steps are skipped some steps later, for one after the
other, and `segments` at the same moment with a list of them; `skipping` comes before skipped steps,
`sampling` before one that is sampled again (`flatout.agent.step_sampler`); a probe fires `enough`
when it has seen what it was started for: the run ends with the step."""

Listener = Callable[..., None]


GradientListener = Callable[["torch.nn.Parameter"], None]
_LISTENERS: list[GradientListener] = []


def listen(listener: GradientListener) -> None:
    """Call `listener` with each parameter that is about to be updated inside backward."""
    _LISTENERS.append(listener)


def tell(parameter: "torch.nn.Parameter") -> None:
    """Say that a parameter is updated now, with the gradient that it has."""
    for listener in _LISTENERS:
        listener(parameter)


ELSEWHERE = "elsewhere"
"""A thread other than the main one trains."""
TRAINED = "trained"
"""What a process notes that made training steps in a run with a recipe."""
EMPTY = "empty"
"""A loader came to its end and had not given a batch."""


def leave_note(folder: str, name: str, found: Mapping[str, Any]) -> None:
    """Note something once under a name; a process without a trial's folder notes nothing."""
    if not folder:
        return
    path = Path(folder) / f"{name}-{os.getpid()}.json"
    with contextlib.suppress(OSError):  # the trial is over
        if not path.exists():
            path.write_text(json.dumps(found), encoding="utf-8")
