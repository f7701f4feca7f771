"""The chain of what a loader's workers do when they start: each lever's part, then the script's."""

from typing import Any, TypeVar

LinkT = TypeVar("LinkT")


def find_link(loader: Any, kind: type[LinkT]) -> LinkT | None:
    """Return the part of a kind in a loader's chain, None where it has none.

    Each part of ours is an object that has what comes after it as `then`.

    Look when an epoch begins, not when the loader is built: frameworks set a start of their own
    on a loader that has none yet (Lightning does, to seed its workers).
    """
    found = loader.worker_init_fn
    while found is not None and not isinstance(found, kind):
        found = getattr(found, "then", None)
    return found
