"""The chain of what a loader's workers do when they start: each lever's part, then the script's."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class Link(Protocol):
    """A `worker_init_fn` of ours: does its own part, then what was asked for before it."""

    then: Callable[[int], Any] | None

    def __call__(self, number: int) -> None:
        """Start a worker."""


LinkT = TypeVar("LinkT", bound=Link)


def find_link(loader: Any, kind: type[LinkT]) -> LinkT | None:
    """Return the part of a kind in a loader's chain, None where it has none.

    Look when an epoch begins, not when the loader is built: frameworks set a start of their own
    on a loader that has none yet (Lightning does, to seed its workers).
    """
    found = loader.worker_init_fn
    while found is not None and not isinstance(found, kind):
        found = getattr(found, "then", None)
    return found
