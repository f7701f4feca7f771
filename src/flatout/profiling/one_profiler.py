"""Torch's profiler is one for the whole process: ours gives way to the script's own.

A second one beside a first ends its record or raises, and in a line of the script's. Scripts
prepare theirs some steps before they start it, so both moments are watched. A script that was seen
to use it is left alone from then on.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.autograd import profiler

BARRED = "the script uses torch's profiler itself"
"""What probes say that do without."""
MOMENTS = ("_prepare_trace", "_start_trace")
"""Methods of torch's profile, through which every profile of torch's goes."""


@dataclass(slots=True)
class _Turn:
    """Whose turn it is."""

    is_watching: bool = False
    is_ours: bool = False
    """Whether what is prepared or started now is flatout's."""
    was_scripts: bool = False
    """Whether the script prepared or started one."""
    give_way: Callable[[], None] | None = None
    """Ends the one of flatout's that runs."""


_turn = _Turn()


def watch() -> None:
    """Notice when the script comes, from now on; call it before the training begins."""
    if _turn.is_watching:
        return
    _turn.is_watching = True
    kind: Any = profiler.profile
    for name in MOMENTS:
        setattr(kind, name, _watched(getattr(kind, name)))


def begin(running: Any, stop: Callable[[], None]) -> bool:
    """Start a profile of flatout's; return False, without it, where the script uses one.

    Args:
        running: A profile of torch's that was not entered yet.
        stop: Ends it, before the script begins one of its own; where it has ended already,
            does nothing.
    """
    watch()
    if _turn.was_scripts or profiler._is_profiler_enabled:
        return False
    with ours():
        running.__enter__()
    _turn.give_way = stop
    return True


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Take what is prepared or started in here for flatout's."""
    before, _turn.is_ours = _turn.is_ours, True
    try:
        yield
    finally:
        _turn.is_ours = before


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not _turn.is_ours:
            _turn.was_scripts = True
            give_way, _turn.give_way = _turn.give_way, None
            if give_way is not None:
                # The script's line must not fail because ours could not end.
                with contextlib.suppress(Exception):
                    give_way()
        return original(*args, **kwargs)

    return watched
