"""Find the functions that make a data set's samples, and the objects that they use.

Looked at are the data set, what its attributes hold, and what their functions name: methods of the
same object, functions and objects of the script's modules, what a closure holds. Libraries are not
entered. No property is asked and no code of the script's runs.
"""

import functools
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

METHODS = frozenset({"__getitem__", "__getitems__", "__call__", "forward"})
"""Through which samples, or parts of them, are asked for."""
HOLDERS = frozenset({"dataset", "datasets", "transform", "transforms", "target_transform"})
"""Attributes behind which more of a sample's making is, though a library made the object."""
LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchvision", "albumentations", "flatout", "numpy", "PIL", "cv2", "scipy"),
    *("pandas", "skimage", "imageio", "matplotlib", "tqdm", "h5py", "lmdb"),
}
"""What these catch they raise again, as `torch.nn.Module` does, or it concerns them alone."""
HOLDING = frozenset({"torch", "torchvision", "albumentations", "flatout"})
"""Those of them whose objects hold transforms and data sets of the script's."""
INSTALLED = ("/site-packages/", "/dist-packages/")
LISTS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
PLAIN = (str, bytes, int, float, complex, type(None))
MAX_ITEMS, MAX_THINGS, MAX_STEPS = 64, 512, 8
"""Most items of one list, most things altogether, and steps from the data set."""
Found = Iterable[tuple[str, Any]]


def reached(*things: Any) -> Iterator[tuple[str, Any]]:
    """Yield functions and objects that the making of samples may use, each with a name."""
    names: set[str] = set(METHODS)
    waiting: deque[tuple[str, Any, int]] = deque(("dataset", thing, 0) for thing in things)
    heaps: deque[tuple[str, Any, int]] = deque()
    """Lists in lists, as boxes of pictures are: after all else, of which they would leave none."""
    seen: dict[int, Any] = {}  # kept, or an identity would be given to another object
    while (waiting or heaps) and len(seen) < MAX_THINGS:
        name, value, steps = (waiting or heaps).popleft()
        if id(value) in seen or issubclass(type(value), PLAIN):
            continue
        seen[id(value)] = value
        yield name, value
        # What stands for something else may raise anything where it is asked for its class.
        with suppress(Exception):
            if steps < MAX_STEPS:
                is_list = issubclass(type(value), (*LISTS, dict))
                for what, part in _behind(name, value, names):
                    is_heap = is_list and issubclass(type(part), (*LISTS, dict))
                    (heaps if is_heap else waiting).append((what, part, steps + 1))


def codes(function: FunctionType) -> Iterator[CodeType]:
    """Yield the code of a function and of those within it."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]


def is_of_library(function: FunctionType) -> bool:
    """Return whether a function is one of the libraries that are not entered."""
    return _package(function) in LIBRARIES


def _behind(name: str, value: Any, names: set[str]) -> Found:
    """Return what one thing leads to.

    `names` are all that functions found so far name, to which those of others are added.
    """
    kind = type(value)
    if kind is FunctionType:
        return _of_function(value)
    if issubclass(kind, type):
        return []
    parts, package = _parts(name, value), _package(kind)
    if package in LIBRARIES:
        return [*parts, *(_attributes(value) if package in HOLDING else [])]
    is_strange = name not in HOLDERS and _is_installed(sys.modules.get(kind.__module__))
    return parts if is_strange else [*_methods(kind, names), *parts, *_attributes(value)]


def _parts(name: str, value: Any) -> Found:
    """Return what is in a list and the like; nothing for any other thing."""
    kind = type(value)  # an instance may have a `__class__` of its own
    parts: Iterable[Any] = ()
    base = next((base for base in LISTS if issubclass(kind, base)), None)
    if base is not None:
        parts = islice(base.__iter__(value), MAX_ITEMS)  # the class's own may make samples
    elif issubclass(kind, dict):
        # Not all at once: each value that a forked worker touches is a page that it copies.
        parts = list(islice(dict.values(value), MAX_ITEMS))
    elif issubclass(kind, MethodType):
        parts = (value.__func__, value.__self__)
    elif issubclass(kind, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif issubclass(kind, functools._lru_cache_wrapper):
        parts = (value.__wrapped__,)
    return [(name, part) for part in parts]


def _of_function(function: FunctionType) -> Found:
    """Return what a function of the script's names, and what it holds."""
    if is_of_library(function):
        return []
    found: list[tuple[str, Any]] = [
        *vars(function).items(),
        *(("", part) for part in function.__defaults__ or ()),
    ]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a name that has no value yet
            found.append(("", cell.cell_contents))
    names = {name for code in codes(function) for name in code.co_names}
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        found.append((name, value))
        if isinstance(value, ModuleType) and not _is_foreign(value, function):
            found += [(part, vars(value)[part]) for part in names & vars(value).keys()]
    own = [(name, part) for name, part in found if not _is_foreign(part, function)]
    kinds = [part for _, part in own if isinstance(part, type)]
    return [*own, *(method for kind in kinds for method in _methods(kind, {*names, "__init__"}))]


def _methods(kind: type, names: set[str]) -> list[tuple[str, Any]]:
    """Return what a class has under some names, and under those that these functions name.

    Those of the classes below are returned as well: `super` may call them.
    """
    found: list[tuple[str, Any]] = []
    waiting, asked = list(names), set(names)
    owners = [vars(owner) for owner in inspect.getmro(kind) if _package(owner) not in LIBRARIES]
    while waiting:
        name = waiting.pop()
        for value in (_function(owner[name]) for owner in owners if name in owner):
            found.append((f"{kind.__name__}.{name}", value))
            if isinstance(value, FunctionType):
                more = {one for code in codes(value) for one in code.co_names} - asked
                asked |= more
                waiting += more
    names |= asked
    return found


def _function(value: Any) -> Any:
    """Return the function of a method or a property; anything else as it is."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, functools.cached_property) else value


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return what an object holds, without asking its properties."""
    found: dict[str, Any] = {}
    try:
        found |= object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001  a property of that name may raise anything
        found = {}
    for owner in inspect.getmro(type(value)):
        for name, slot in tuple(vars(owner).items()):
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):
                    found[name] = slot.__get__(value)
    return list(found.items())


def _is_foreign(value: Any, function: FunctionType) -> bool:
    """Return whether a value is a library's, seen from a function that names it."""
    if isinstance(value, ModuleType):
        module: ModuleType | None = value
        package = value.__name__.partition(".")[0]
    elif isinstance(value, FunctionType | type):
        module, package = sys.modules.get(value.__module__), _package(value)
    else:
        return False
    return package in LIBRARIES or (package != _package(function) and _is_installed(module))


def _is_installed(module: ModuleType | None) -> bool:
    file = str(getattr(module, "__file__", None) or "").replace("\\", "/")
    return any(folder in file for folder in INSTALLED)


def _package(value: Any) -> str:
    return str(value.__module__).partition(".")[0]
