"""Notice that a script changed a data set between two looks at it.

A script may draw new negatives, swap a transform or set another size before each epoch. What the
attributes hold is noted and compared: scalars by value, objects by identity and by what they hold
in turn, big lists and arrays by their length and a few elements. The samples themselves are not
looked at, and what a data set takes from elsewhere (a global, a file) is not seen.
"""

import os
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from logging import Logger
from pathlib import PurePath
from threading import Lock, get_ident
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

ELEMENTS = 16
"""Elements that are looked at of a list: one that is filled again shows in nearly any of them. A
lone element that changes in place among many more is not seen."""
NUMBERS = 256
"""Elements that are looked at of an array, which are often zeros: these cost a few microseconds."""
DEPTH = 4
"""Levels below the data set, as in `transform.transforms[0].size`; wrapped sets count as none."""
MAX_OPENED = 256
"""Objects that are looked into, the upper levels first: about a microsecond each."""
ITEMS = "its items"
"""The name of what has none."""
GOLDEN = 0.6180339887498949
"""Multiples of it, without the whole part, lie evenly and fall into step with no column."""
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types whose values are compared themselves."""
SIZED = (list, tuple, dict, set, frozenset, deque)
"""Types that are known by how many they hold, too."""
SHARED = "ctypes"
"""Where the types of numbers are from that processes share, as `multiprocessing.Value` does."""
OPAQUE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, Logger, PurePath)
"""What is known by identity alone: it leads to things that are none of the data set's. A path keeps
its text in a slot once someone asks for it, and never changes."""


@dataclass(frozen=True, slots=True)
class State:
    """What the attributes of a data set held at one moment."""

    facts: Mapping[str, list[Any]]
    """By attribute; plain values that can be compared."""
    held: tuple[Any, ...]
    """Weak references: another object may be given the identity of one that is gone."""


def state_of(dataset: Any, **others: Any) -> State:
    """Return what the attributes of a data set, and other objects by name, hold now."""
    facts: dict[str, list[Any]] = {}
    held: list[Any] = []
    for name, value in held_by(dataset, **others):
        facts.setdefault(name, []).append(_fact(value, held))
    return State(facts, tuple(held))


def held_by(dataset: Any, **others: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what the attributes of a data set, and other objects by name, hold, each with a name.

    Big lists are looked into at a few places, and no further than `DEPTH` levels and `MAX_OPENED`
    objects.
    """
    waiting = deque((name, value, DEPTH) for name, value in [*_parts(dataset), *others.items()])
    opened = {id(dataset)}
    while waiting:
        name, value, left = waiting.popleft()
        yield name, value
        if not left or type(value) in PLAIN or id(value) in opened or isinstance(value, OPAQUE):
            continue
        if len(opened) > MAX_OPENED:
            continue
        opened.add(id(value))
        below = DEPTH if _is_dataset(value) else left - 1
        waiting.extend((name, part, below) for pair in _parts(value) for part in pair)


def find_change(before: State, after: State) -> str | None:
    """Return the name of an attribute that holds something else, None where none does.

    >>> from types import SimpleNamespace
    >>> data = SimpleNamespace(size=128, names=["a", "b"])
    >>> first = state_of(data)
    >>> find_change(first, state_of(data))
    >>> data.size = 192
    >>> find_change(first, state_of(data))
    'size'
    """
    for name in [*before.facts, *after.facts]:
        if before.facts.get(name) != after.facts.get(name):
            return name
    if any(reference() is None for reference in before.held):
        return "something that it holds"
    return None


class ChangeWatch:
    """Tells when anybody but the readers that say so changed a data set.

    A data set may change by being read: it counts, or opens its files late. So its state is noted
    again whenever a reader is done.
    """

    def __init__(self, dataset: Any, trouble: str = "") -> None:
        self.dataset = dataset
        self.trouble = trouble
        """What changed; empty as long as nothing did."""
        self._readers: set[tuple[int, int]] = set()
        self._locks: dict[int, Lock] = {}
        self._begun = 0
        self._rests_in = 0
        self._state = state_of(dataset)

    def __reduce__(self) -> tuple[type["ChangeWatch"], tuple[Any, str]]:
        """Look once more before a spawned process gets the data set as it is now."""
        self.is_changed()
        return ChangeWatch, (self.dataset, self.trouble)

    def is_changed(self) -> bool:
        """Return whether it changed since it was read last, now or at an earlier look."""
        begun = self._begun
        if not self.trouble and not self._is_read() and self._rests_in != os.getpid():
            name = find_change(self._state, state_of(self.dataset))
            if name is not None and self._begun == begun:  # else a reader came in between
                self.trouble = reason(name)
            if _is_worker():
                self._rests_in = os.getpid()  # no script reaches the copy of a loader's worker
        return bool(self.trouble)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Take what changes meanwhile for the work of reading."""
        me = (os.getpid(), get_ident())
        self._readers.add(me)
        self._begun += 1
        try:
            yield
        finally:
            # A lock for each process: one that another thread holds when it forks stays shut there.
            with self._locks.setdefault(os.getpid(), Lock()):
                self._note_unless_read(me)
                self._readers.discard(me)

    def _note_unless_read(self, me: tuple[int, int]) -> None:
        """Note the state when the last reader is done; whoever looks waits for that."""
        is_over = bool(self.trouble) or self._rests_in == os.getpid()
        if not is_over and not self._is_read(besides=me):
            self._state = state_of(self.dataset)

    def _is_read(self, besides: tuple[int, int] | None = None) -> bool:
        # A process that was forked while others read has their entries, not their threads.
        readers = (reader for reader in tuple(self._readers) if reader != besides)
        return any(pid == os.getpid() for pid, _ in readers)


def reason(name: str) -> str:
    """Return the clause that says what changed.

    >>> reason("size")
    'the script changed the data set (size) after its samples had been read'
    """
    return f"the script changed the data set ({name}) after its samples had been read"


def _is_worker() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.utils.data.get_worker_info() is not None


def _fact(value: Any, held: list[Any]) -> tuple[Any, ...]:
    """Return what one value is known by, and keep a weak reference to it where it allows one."""
    kind = type(value)
    if kind in PLAIN:
        return (kind, value)
    if isinstance(value, SIZED):
        return (kind, id(value), len(value))
    with suppress(TypeError):  # not every type allows one
        held.append(weakref.ref(value))
    return (kind, id(value), *_content(value))


def _content(value: Any) -> tuple[Any, ...]:
    """Return a few facts about the numbers of a tensor, an array or a buffer."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _of_array(value)
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if hasattr(value, "__dict__") and type(value).__module__ != SHARED:
        return ()  # known by its attributes
    try:
        view = memoryview(value).cast("B")
    except (TypeError, ValueError, BufferError):
        return ()
    return (len(view), bytes(view[i] for i in _places(len(view), NUMBERS)))


def _of_array(array: Any) -> tuple[Any, ...]:
    return (array.shape, array.dtype.str, array.flat[_array_places(array.size)].tobytes())


def _of_tensor(tensor: Any) -> tuple[Any, ...]:
    facts: tuple[Any, ...] = (tuple(tensor.shape), str(tensor.device))
    if not tensor.is_inference():  # else it has no version
        facts = (*facts, tensor._version)
    if tensor.device.type != "cpu":
        return facts  # reading its numbers would wait for the device
    try:
        return (*facts, *_of_array(tensor.detach().numpy()))
    except (TypeError, RuntimeError):
        return facts  # bfloat16, sparse: numpy has no such thing


@lru_cache
def _places(length: int, count: int = ELEMENTS) -> Sequence[int]:
    """Return the numbers of the elements that are looked at.

    >>> _places(3), len(_places(10**6))
    (range(0, 3), 16)
    """
    if length <= count:
        return range(length)
    return [*(int(length * (i * GOLDEN % 1)) for i in range(1, count)), length - 1]


@lru_cache
def _array_places(length: int) -> Any:
    import numpy as np

    return np.array(_places(length, NUMBERS), dtype=np.int64)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a value holds, each part with its name."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        found += islice(value.items(), ELEMENTS)
    elif isinstance(value, list | tuple):
        found += [(ITEMS, value[i]) for i in _places(len(value))]
    elif isinstance(value, set | frozenset | deque):
        found += [(ITEMS, item) for item in tuple(islice(value, ELEMENTS))]
    elif type(value).__module__.startswith("pandas.") and hasattr(value, "arrays"):
        found += [("its columns", array) for array in value.arrays]  # of a table's block manager
    elif isinstance(value, partial):
        found += [(ITEMS, part) for part in (value.func, value.args, value.keywords)]
    return [*found, *_in_slots(value), *getattr(value, "__dict__", {}).items()]


def _in_slots(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the classes of a value keep in `__slots__`, past any `__getattr__`."""
    for owner in type(value).__mro__:
        if vars(owner).get("__slots__"):
            for name, slot in vars(owner).items():
                if isinstance(slot, MemberDescriptorType):
                    with suppress(AttributeError):  # not set
                        yield name, slot.__get__(value)


def _is_dataset(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__getitem__") and hasattr(value, "__dict__")
