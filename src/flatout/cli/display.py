"""What is shown while a tuning works: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.progress import Progress as Bar
from rich.progress_bar import ProgressBar
from rich.text import Text

from flatout.core.progress import Progress
from flatout.core.units import format_duration, format_ratio
from flatout.reporting.tables import ascii_only

Tell = Callable[[Progress], None]


@contextmanager
def display(budget_s: float) -> Iterator[Tell]:
    """Give the function that a long verb tells its progress to. Writes to stderr.

    Args:
        budget_s: What a full bar stands for.
    """
    if not sys.stderr.isatty():
        yield _line
        return
    console = Console(stderr=True, highlight=False)
    start = Progress(trying="starting", done_share=0.0, elapsed_s=0.0, left_s=budget_s)
    columns = (Spent(bar_width=24), Left(), Best(), Trying())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=budget_s, now=start, at=time.monotonic())

        def tell(progress: Progress) -> None:
            if progress.event:
                console.print(ascii_only(progress.event), markup=False)
            bar.update(task, now=progress, at=time.monotonic())

        yield tell


def _line(progress: Progress) -> None:
    """Write an event on a line of its own; mere ticks would fill a log."""
    if progress.event:
        event = ascii_only(progress.event)
        print(f"[{format_duration(progress.elapsed_s)}] {event}", file=sys.stderr)


class Spent(BarColumn):
    """The share of the budget that is spent; goes on between two tells."""

    def render(self, task: Task) -> ProgressBar:
        """Return the bar at this moment."""
        spent = task.fields["now"].elapsed_s + _since(task)
        return ProgressBar(total=task.total, completed=spent, width=self.bar_width)


class Left(ProgressColumn):
    """The time left of the budget."""

    def render(self, task: Task) -> Text:
        """Return it in words."""
        left_s = max(0.0, task.fields["now"].left_s - _since(task))
        return Text(f"{format_duration(left_s)} left")


class Best(ProgressColumn):
    """The gain of the levers kept so far."""

    def render(self, task: Task) -> Text:
        """Return it as a ratio."""
        return Text(f"best {format_ratio(task.fields['now'].best_ratio)}")


class Trying(ProgressColumn):
    """What is being tried; last, because it has no fixed width."""

    def render(self, task: Task) -> Text:
        """Return it in words."""
        return Text(ascii_only(task.fields["now"].trying), overflow="ellipsis", no_wrap=True)


def _since(task: Task) -> float:
    return time.monotonic() - float(task.fields["at"])
