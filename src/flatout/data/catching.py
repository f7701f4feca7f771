"""Tell whether a data set goes on after an error of any kind, as those do that skip broken files.

What stands for an array is refused by code that knows true arrays only. Such an error ends the
following and the batch is made again, unless the data set itself catches it: then it would hand out
another sample than it does by itself, and nobody would see it.
"""

import dis
from types import CodeType, FunctionType
from typing import Any

from flatout.data.reach import codes, is_of_library, reached

MATCHES = frozenset({"CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"})
"""Opcodes of `except SomeError`, since Python 3.11 and in 3.10."""
NARROW = frozenset(
    {
        *("OSError", "IOError", "FileNotFoundError", "PermissionError", "UnidentifiedImageError"),
        *("KeyError", "IndexError", "StopIteration", "ImportError", "ModuleNotFoundError"),
    }
)
"""Errors that no array is refused with."""


def find_catcher(dataset: Any) -> str:
    """Return the name of a function that catches errors of any kind, or nothing.

    Looked at are the methods that give samples, in the data set, in what it holds and in its
    transforms, and what they call of their own object, of the script's modules and of closures.
    """
    for name, value in reached(dataset):
        if type(value) is not FunctionType or is_of_library(value):
            continue
        if any(_catches_all(code) for code in codes(value)):
            return name if "." in name else value.__qualname__
    return ""


def _catches_all(code: CodeType) -> bool:
    if "suppress" in code.co_names:
        return True
    if not getattr(code, "co_exceptiontable", b"?"):
        return False  # Python 3.11 and later: nothing is caught
    found = [x for x in dis.get_instructions(code) if x.opname not in ("CACHE", "EXTENDED_ARG")]
    for number, one in enumerate(found):
        before, after = found[number - 1], found[min(number + 1, len(found) - 1)]
        if one.opname in MATCHES and before.argval not in NARROW:
            return True
        # A bare `except:` drops the error at once; `finally` and `with` do not.
        if one.opname == "PUSH_EXC_INFO" and after.opname == "POP_TOP":
            return True
    return False
