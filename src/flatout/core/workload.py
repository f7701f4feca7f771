"""A Workload: what is trained, as a command."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from flatout.core.secrets import hide_in_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training script (or a Task) with its arguments."""

    target: str
    """The script's path as the user typed it, or `file.py:name` for a Task."""
    arguments: tuple[str, ...] = ()
    """Everything after the script's name; it belongs to the script."""
    folder: Path = field(default_factory=Path.cwd)
    """Working directory of the run."""
    python: str = "python"
    """The interpreter that runs it."""
    is_task: bool = False

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
        return " ".join([self.target, shlex.join(hide_in_words(self.arguments))]).rstrip()
