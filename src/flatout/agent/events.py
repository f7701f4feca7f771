"""Notes of a training process in the trial's folder: they tell it where no result is written.

What a training process did, as small records that hook points fill and recorders read.

Steps made inside backward: who wants to see a gradient before it is used up and gone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

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


@dataclass(slots=True)
class Segment:
    """Everything between two outermost optimizer steps (of whichever optimizer)."""

    who: int = -1
    """Which optimizer ended it, by order of construction; -1 where backward did (none exists)."""
    seconds: list[float] = field(default_factory=list)
    """By phase, as `flatout.records.phase_clock.NAMES`."""
    end: float = 0.0
    is_sampled: bool = True
    """False for a skipped step: its length and batches are known, its phases are not."""
    batches: int = 0
    samples: int = 0
    batch_bytes: int = 0
    forwards: int = 0
    calls: list[int] = field(default_factory=list)
    """Forwards of each root, by order of discovery; shorter where later roots were not called."""
    backwards: int = 0
    closures: int = 0
    """How often the optimizer called its closure: each time but the first the samples are the
    same, at other parameters."""
    evals: int = 0
    loader_starts: int = 0
    communication: list[float] = field(default_factory=list)
    """Seconds in collectives by the phase they were called in; empty where there were none."""
    losses: list[Any] = field(default_factory=list)
    """Floats; on a device detached tensors until the run ends: reading one would synchronise."""


@dataclass(slots=True)
class LoaderSeen:
    """One construction site of a `DataLoader`."""

    address: str
    asked: dict[str, Any]
    """The arguments as the script gave them."""
    is_training: bool = False
    batches: int = 0
    epochs: int = 0
    batch_bytes: list[int] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    """Of each epoch: the time to make the iterator and to draw the first batch."""
    ends_s: list[float] = field(default_factory=list)
    """Of each epoch: the time to learn that no batch is left, in which workers are ended."""


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
