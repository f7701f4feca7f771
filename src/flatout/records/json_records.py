"""Records to JSON values and back, by the types that their dataclasses declare.

Not msgspec or cattrs: the training script's process reads records too, in a Python of the user's
that flatout adds nothing but itself to.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SIMPLE = frozenset({int, float, bool, str, type(None)})
"""What JSON has as it is: a trial writes many thousands of such numbers."""
MAX_SHOWN = 60
"""Characters of a wrong value that a message has."""


def to_plain(record: Any) -> dict[str, Any]:
    """Return a dataclass instance as JSON values; tuples become lists and sets sorted lists.

    A record inside it that has a form of its own, by its `to_json`, takes that.
    Numbers that are not finite stay: who writes a file decides about them.
    """
    return {name: _plain(getattr(record, name)) for name in record.__dataclass_fields__}


def _plain(value: Any) -> Any:
    if type(value) in SIMPLE:
        return value
    if isinstance(value, Enum):
        value = value.value
    elif is_dataclass(value):
        value = value.to_json() if hasattr(value, "to_json") else to_plain(value)
    elif isinstance(value, Mapping):
        value = {key: _plain(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        value = [_plain(item) for item in value]
    elif isinstance(value, frozenset):
        value = sorted(value)
    return str(value) if isinstance(value, Path) else value


def from_plain(kind: type[T], plain: Any, where: str = "") -> T:
    """Return the record that `to_plain` wrote, every field of its declared type.

    Keys that are no field are ignored, and a missing one takes its default: other versions wrote
    more or less. A value may be a record already. `where` is what is read, for messages.
    """
    if not isinstance(plain, Mapping):
        raise _wrong(kind, plain, where or "it")
    found = {}
    for name, hint, has_default in declared(typing.cast("Any", kind)):
        path = f"{where}.{name}" if where else name
        if name in plain:
            found[name] = _value(hint, plain[name], path)
        elif not has_default:
            raise ValueError(f"{path} is missing")
    return kind(**found)


@lru_cache(maxsize=256)
def declared(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Return name, type and whether there is a default, of each field."""
    hints = typing.get_type_hints(kind)
    return tuple(
        (
            item.name,
            hints[item.name],
            item.default is not MISSING or item.default_factory is not MISSING,
        )
        for item in fields(kind)
    )


@lru_cache(maxsize=1024)
def _parts_of(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _value(hint: Any, value: Any, where: str) -> Any:
    if hint in SIMPLE and type(value) is hint:
        return value
    origin, parts = _parts_of(hint)
    if origin in (types.UnionType, typing.Union):
        # No record has a choice of several types; None is the only other one.
        (kind,) = [part for part in parts if part is not type(None)]
        return None if value is None else _value(kind, value, where)
    if origin in (tuple, frozenset, list):
        each = parts if origin is tuple else (*parts, ...)
        return origin(_items(hint, each, value, where))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _wrong(hint, value, where)
        return {key: _value(parts[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is typing.Literal and value not in parts:
        raise _wrong(hint, value, where)
    return value if hint is Any or origin is typing.Literal else _leaf(hint, value, where)


def _items(hint: Any, parts: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(hint, value, where)
    each = (parts[0],) * len(value) if parts[-1] is Ellipsis else parts
    if len(each) != len(value):
        raise _wrong(hint, value, where)
    if parts[0] in SIMPLE and all(part is parts[0] for part in each):
        kinds = set(map(type, value))
        if kinds <= {parts[0]}:
            return tuple(value)
    pairs = zip(each, value, strict=True)
    return tuple(_value(part, item, f"{where}[{i}]") for i, (part, item) in enumerate(pairs))


def _leaf(kind: type, value: Any, where: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and is_number:
        return value
    if isinstance(value, kind) and (is_number or kind is not int):
        return value
    if is_dataclass(kind):
        return from_plain(kind, value, where)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if issubclass(kind, Enum) and value in [member.value for member in kind]:
        return kind(value)
    raise _wrong(kind, value, where)


def _wrong(hint: Any, value: Any, where: str) -> ValueError:
    is_class = typing.get_origin(hint) is None
    words = hint.__name__ if is_class else str(hint).replace("typing.", "")
    return ValueError(f"{where}={str(value)[:MAX_SHOWN]!r} is no {words}")
