"""Tell whether a data set goes on after an error of any kind, as those do that skip broken files.

What stands for an array is refused by code that knows true arrays only. Such an error ends the
following and the batch is made again, unless the data set itself catches it: then it would hand out
another sample than it does by itself, and nobody would see it.
"""

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any

MATCHES = frozenset({"CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"})
"""Opcodes of `except SomeError`, since Python 3.11 and in 3.10."""
NARROW = frozenset(
    {
        *("OSError", "IOError", "FileNotFoundError", "PermissionError", "UnidentifiedImageError"),
        *("KeyError", "IndexError", "StopIteration", "ImportError", "ModuleNotFoundError"),
    }
)
"""Errors that no array is refused with."""
HOLDERS = ("dataset", "datasets", "transform", "transforms", "target_transform")
"""Attributes behind which more of a sample's making lies."""
METHODS = ("__getitem__", "__getitems__", "__call__", "forward")
DEPTH = 4
LIBRARIES = frozenset({"torch", "torchvision", "albumentations", "flatout"})
"""What these catch they raise again, as `torch.nn.Module` does, or it concerns them alone."""


def find_catcher(dataset: Any) -> str:
    """Return the name of a function that catches errors of any kind, or nothing.

    Looked at are the methods that give samples, in the data set, in those it wraps and in its
    transforms, and what they call of their own object.
    """
    return next((name for one in _parts(dataset, DEPTH) for name in _catchers(type(one))), "")


def _parts(thing: Any, depth: int) -> Iterator[Any]:
    yield thing
    if not depth:
        return
    for name in HOLDERS:
        held = getattr(thing, name, None)
        for one in held if isinstance(held, list | tuple) else (held,):
            if one is not None:
                yield from _parts(one, depth - 1)


def _catchers(kind: type) -> Iterator[str]:
    waiting, seen = list(METHODS), set(METHODS)
    while waiting:
        name = waiting.pop()
        function = getattr(kind, name, None)
        code = getattr(function, "__code__", None)
        package = str(getattr(function, "__module__", "")).partition(".")[0]
        if not isinstance(code, CodeType) or package in LIBRARIES:
            continue
        if _catches_all(code):
            yield f"{kind.__name__}.{name}"
        called = {one for one in code.co_names if one not in seen}
        seen |= called
        waiting += called


def _catches_all(code: CodeType) -> bool:
    if "suppress" in code.co_names:
        return True
    found = [x for x in dis.get_instructions(code) if x.opname not in ("CACHE", "EXTENDED_ARG")]
    for number, one in enumerate(found):
        before, after = found[number - 1], found[min(number + 1, len(found) - 1)]
        if one.opname in MATCHES and before.argval not in NARROW:
            return True
        # A bare `except:` drops the error at once; `finally` and `with` do not.
        if one.opname == "PUSH_EXC_INFO" and after.opname == "POP_TOP":
            return True
    return False
