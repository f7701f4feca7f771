"""A Trial: one recipe run once on one Workload (a training command), in one fresh process."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from flatout.records.json_records import from_plain, to_plain
from flatout.records.profile import Profile, profile_from_json
from flatout.records.recipe import Recipe
from flatout.records.secrets import hide_in_words

TECHNIQUE_NOTE = "note.technique"
"""The sentence of what a technique that acted says at its end, among the notes of a profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training script (or a Task) with its arguments."""

    target: str
    """The script's path as the user typed it, or `file.py:name` for a Task."""
    arguments: tuple[str, ...] = ()
    """Everything after the script's name; it belongs to the script."""
    folder: Path = field(default_factory=Path.cwd)
    python: str = "python"
    python_options: tuple[str, ...] = ()
    """What the interpreter is given in front of the script, such as `-u`."""
    is_task: bool = False
    ranks: int = 1
    """Processes that run it together, each with its part of every batch."""
    is_spread: bool = False
    """Whether it is a Task that a table `[parallel]` spreads over the ranks."""
    restarts: int = 0
    """How often all ranks are started again after one of them failed."""

    @property
    def name(self) -> str:
        """A short name for folders and titles.

        >>> Workload(target="src/train.py").name, Workload(target="job.py:task", is_task=True).name
        ('train', 'job')
        """
        path = self.target.partition(":")[0] if self.is_task else self.target
        return Path(path.removeprefix("-m ")).stem

    @property
    def command_line(self) -> str:
        """What the user would type after `python`, with secrets hidden: it is shown and stored.

        >>> Workload(target="train.py", arguments=("--name", "my run")).command_line
        "train.py --name 'my run'"
        """
        is_module = self.target.startswith("-m ")
        target = self.target if is_module else shlex.quote(self.target)
        return " ".join([target, shlex.join(hide_in_words(self.arguments))]).rstrip()

    def under(self, recipe: Recipe) -> "Workload":
        """Return the workload as a recipe runs it: on as many ranks as that spreads it over."""
        return replace(self, ranks=recipe.num_ranks) if recipe.num_ranks > 1 else self


class Outcome(Enum):
    """How a trial ended. Every one of them is a result."""

    OK = "ok"
    OOM = "oom"
    CRASH = "crash"
    HANG = "hang"
    NAN = "nan"
    TOO_SHORT = "too_short"
    NO_STEPS = "no_steps"
    """The script ended on its own and no training step was seen."""
    REFUSED = "refused"
    """A technique of the recipe refused, and the process ended at once: nothing was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What became of one technique inside the process."""

    technique: str
    status: str
    """`applied`, `not_applicable`, `failed`, or `unseen` when its hook point was never reached."""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One recipe, one process, one result."""

    recipe: Recipe
    outcome: Outcome
    profile: Profile | None = None
    partial: Profile | None = None
    """What was seen until the script failed or was killed, where that was enough steps."""
    message: str = ""
    """For an outcome other than ok: one line that says what happened."""
    traceback: str = ""
    """The script's own last output where it failed."""
    applied: tuple[Applied, ...] = ()
    wall_s: float = 0.0
    """Seconds the whole process took, start-up included."""
    changed_files: tuple[str, ...] = ()
    """Files of the user's that differed after the trial; always empty unless a defect."""
    undone: int = 0
    """Writes of the script that were overlaid or rolled back."""
    guard_path: str | None = None
    """Where the guard's record is, for a guard trial."""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def not_applied(self) -> tuple[Applied, ...]:
        """The techniques of the recipe that did not take effect."""
        return tuple(item for item in self.applied if item.status != "applied")

    def to_json(self) -> dict[str, Any]:
        """Return a plain JSON mapping."""
        return to_plain(self)


def trial_from_json(plain: Mapping[str, Any]) -> Trial:
    """Return the trial that `Trial.to_json` wrote."""
    profiles = {
        name: profile_from_json(plain[name]) if plain.get(name) else None
        for name in ("profile", "partial")
    }
    return from_plain(Trial, {**plain, **profiles})
