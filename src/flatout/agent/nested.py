"""The leaves of nested batches and outputs: walk them, or change them and keep the types."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the structure with `change` applied to every leaf.

    Lists, tuples, named tuples, mappings and dataclasses are rebuilt with their own type; anything
    else is a leaf, and so is a named tuple with a `to` method: torch's packed sequences know better
    than this function which of their parts may move. A structure in which no leaf changed is
    returned as it is, never copied.

    >>> map_leaves({"x": [1, 2], "y": (3,)}, lambda leaf: leaf * 10)
    {'x': [10, 20], 'y': (30,)}
    """
    if isinstance(value, Mapping):
        return _mapping(value, change)
    if isinstance(value, list | tuple) and not _moves_itself(value):
        changed = [map_leaves(item, change) for item in value]
        if all(new is old for new, old in zip(changed, value, strict=True)):
            return value
        # A named tuple takes its fields one by one, every other sequence takes an iterable.
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if is_dataclass(value) and not isinstance(value, type):
        return _record(value, change)
    return change(value)


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield every leaf of a structure, as `map_leaves` meets them.

    >>> list(leaves_of({"x": [1, 2], "y": (3,)}))
    [1, 2, 3]
    """
    parts: Iterable[Any]
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple) and not _moves_itself(value):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, f.name) for f in fields(value))
    else:
        yield value
        return
    for part in parts:
        yield from leaves_of(part)


def _moves_itself(value: Any) -> bool:
    return hasattr(value, "_fields") and hasattr(value, "to")


def _mapping(value: Mapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    changed = {key: map_leaves(item, change) for key, item in value.items()}
    if all(changed[key] is item for key, item in value.items()):
        return value
    if not isinstance(value, MutableMapping):
        return type(value)(changed)  # type: ignore[call-arg]
    # A copy keeps what a constructor cannot: a default factory, attributes alongside the items.
    rebuilt = copy.copy(value)
    for key, item in changed.items():
        rebuilt[key] = item
    return rebuilt


def _record(value: Any, change: Callable[[Any], Any]) -> Any:
    changed = {f.name: map_leaves(getattr(value, f.name), change) for f in fields(value)}
    if all(getattr(value, name) is item for name, item in changed.items()):
        return value
    rebuilt = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(rebuilt, name, item)  # works on frozen records too
    return rebuilt
