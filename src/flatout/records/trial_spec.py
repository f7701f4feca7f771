"""A TrialSpec: what flatout asks of the training script's process.

flatout writes it as JSON before the process starts, and the process reads it once torch is
imported (`flatout.agent.bootstrap`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.records.recipe import Recipe

MEASURE_S = 25.0
"""Steady or not, a trial ends after this long in the training loop if it has three clean steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """What is measured or done in one process, and where it writes.

    The fields from `entry` on are filled in where the process is started.
    """

    mode: str = "measure"
    """`measure`, `guard`, `memory` (a trace of it) or `run`: the real training, not ended."""
    recipe: Recipe = Recipe()
    measure_s: float = MEASURE_S
    steps: int | None = None
    """Exact number of training steps; None measures until there are enough."""
    ends_when_refused: bool = False
    """Whether a technique that refuses ends the trial in its first steps."""
    traces_kernels: bool = False
    skips_below_s: float = 0.0
    """Most steps shorter than this are skipped (`flatout.agent.step_sampler`); 0 samples all."""
    probes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Probes of `flatout.agent.probes` by name, with their options."""
    guard: Mapping[str, Any] | None = None
    """What the guard's recorder does; None for a timed trial."""
    plan: Mapping[str, Any] | None = None
    """Of a run: the predicted memory that it is held against."""
    records_run: bool = False
    """Whether a run leaves its loss over time and the metrics that it prints."""
    says: Mapping[str, str] = field(default_factory=dict)
    """Of a run: what it says on stderr by name, in the reader's language, with fields."""
    language: str = "en"
    details: Mapping[str, Any] = field(default_factory=dict)
    """What an entry of its own needs besides, by its own names."""
    entry: str = ""
    """Dotted module whose `install(spec)` runs once torch is imported."""
    folder: str = ""
    """Where results go; empty where no one reads any."""
    status_folder: str = ""
    """Where `flatout watch` looks, if that is not `folder`."""
    prefix: str = ""
    """`sys.prefix` of flatout's own Python."""
    seed: int | None = None
    """Seeds Python, numpy and torch before the script's own code; None leaves them alone."""
    descendants_end: bool = False
    """Whether what the script starts ends with flatout."""
    undo: str | None = None
    """Folder of the journal with which the script's writes are undone; None undoes nothing."""
    not_journaled: tuple[str, ...] = ()
    """Folders whose changes are not noted there."""
    root_pid: int | None = None
    """The supervisor: the load of all processes below it is the training's own."""

    def translated(self, text: str) -> str:
        """Return what the process says in the reader's language, if its Python can read that."""
        try:
            from flatout.records.messages import messages

            return messages(self.language).text(text)
        except ImportError:  # before Python 3.11, without tomli
            return text
