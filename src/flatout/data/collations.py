"""Find a collation of flatout's under those that were wrapped around it."""

from typing import Any, TypeVar

Collation = TypeVar("Collation")


def find_collation(collate: Any, kind: type[Collation]) -> Collation | None:
    """Return the outermost collation of a kind, None without one.

    Args:
        collate: A loader's `collate_fn`; what wraps another one holds it as `__wrapped__`.
        kind: Of the collation that is looked for.
    """
    while collate is not None and not isinstance(collate, kind):
        collate = getattr(collate, "__wrapped__", None)
    return collate
