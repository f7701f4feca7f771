"""Data sets that look like the script's own, share its attributes, and give other samples."""

from collections.abc import Mapping
from typing import Any

from flatout.core.errors import NotApplicable


def stand_in(dataset: Any, members: Mapping[str, Any], again: tuple[Any, ...]) -> Any:
    """Return an object of a subclass of a data set's class that shares all of its attributes.

    Args:
        dataset: what is stood in for.
        members: of the subclass, by name.
        again: a function and its arguments that make the same object in another process.

    Raises:
        NotApplicable: if an object of this class cannot be made to share its attributes.
    """
    kind = type(dataset)
    namespace = {
        **members,
        "__reduce_ex__": lambda _self, _protocol: again,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    shared: Any
    try:
        shared = object.__new__(type(kind.__name__, (kind,), namespace))
        shared.__dict__ = vars(dataset)
    except TypeError as error:
        raise NotApplicable(f"a {kind.__name__} cannot be stood in for: {error}") from None
    return shared
