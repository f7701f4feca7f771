"""Choose how the worker processes of a loader start, with the reason in words.

A forked worker is a copy of this process. A fresh one (spawn, forkserver) gets the data set, the
collation and the start function pickled, and runs the script's module again without being its main
module. `start_facts` looks at the running training process, `choose_start` decides for workers that
a technique brings in, `note_start` notes how any loader's start.
"""

import ast
import copy
import io
import multiprocessing
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import context as contexts
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from flatout.records.errors import NotApplicable

FORK = "fork"
REASON = "flatout_reason"
"""On a context that flatout chose: why."""
OURS = "flatout"
"""Threads with this in their names are not the script's."""
MOST_NAMES = 5


def note_start(asked: dict[str, Any], loader: Any) -> None:
    """Note a start of workers that is about to happen; of several starts the worst."""
    is_kept = loader.persistent_workers and getattr(loader, "_iterator", None) is not None
    if not loader.num_workers or is_kept:
        return
    asked["start_method"] = start_method(loader.multiprocessing_context)
    asked["start_reason"] = start_reason(loader.multiprocessing_context)
    asked["cuda_at_start"] = asked.get("cuda_at_start", False) or is_cuda_in_use()
    asked["threads_at_start"] = ", ".join(other_threads()) or asked.get("threads_at_start", "")


def start_method(context: Any = None) -> str:
    """Return how worker processes start, without fixing the method for the script.

    Args:
        context: the loader's `multiprocessing_context`: a name, a context or None.
    """
    if context is not None:
        return name_of(context)
    # The first of all methods is the default; asking for it otherwise would settle it.
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def start_reason(context: Any = None) -> str:
    """Return why a loader's workers start as they do: who chose the method.

    Args:
        context: the loader's `multiprocessing_context`.
    """
    if context is not None:
        return str(getattr(context, REASON, "the script chose it for this loader"))
    if start_method() != multiprocessing.get_all_start_methods()[0]:
        return "the script chose it for the whole process"
    return "Python's default on this system"


def name_of(context: Any) -> str:
    """Return the method of a loader's `multiprocessing_context`; empty for None."""
    if context is None or isinstance(context, str):
        return context or ""
    return str(context.get_start_method())


def is_cuda_in_use() -> bool:
    """Return whether this process holds a CUDA context of torch's; never wakes the driver."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def other_threads() -> list[str]:
    """Return the names of Python's other threads in this process, a few of them."""
    here = threading.current_thread()
    alive = (thread for thread in threading.enumerate() if thread is not here)
    names = sorted(thread.name for thread in alive if not thread.name.startswith(OURS))
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return names[:MOST_NAMES] + more


GIVEN = ("dataset", "collate_fn", "worker_init_fn")
"""Arguments of a loader that its workers get."""
MAX_DEPTH = 4
MAX_ITEMS = 16
"""Levels of a data set, and items of a list in it, that are searched for CUDA tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """What is known of a loader that is to get workers, and of the process that starts them."""

    asked: str = ""
    """The method that the script chose for this loader; empty where it left that open."""
    usual: str = FORK
    """The method without any choice: what the script set for the process, or Python's default."""
    can_fork: bool = True
    """Whether the system forks safely."""
    has_workers: bool = False
    """Whether the script's own loader starts workers already."""
    trouble: str = ""
    """Why no fresh worker can start. Looked for only where one might: it pickles the data set."""
    is_cuda_in_use: bool = False
    cuda_holder: str = ""
    """Which part of what workers get holds CUDA tensors; empty for none."""
    open_file: str = ""
    """Which part of what forked workers get is a file that is open; empty for none."""


def start_facts(arguments: Mapping[str, Any]) -> StartFacts:
    """Return the facts on a loader with these arguments, at this line of the script."""
    context = arguments.get("multiprocessing_context")
    usual, in_use = start_method(), is_cuda_in_use()
    given = {name: arguments.get(name) for name in GIVEN}
    holder = find_cuda(given) if in_use else ""
    asked, has_workers = name_of(context), bool(arguments.get("num_workers"))
    may_be_fresh = (asked or usual) != FORK
    will_be_copies = not may_be_fresh and not has_workers
    return StartFacts(
        asked=asked,
        usual=usual,
        can_fork=can_fork(),
        has_workers=has_workers,
        trouble=find_trouble(given) if may_be_fresh and not has_workers else "",
        is_cuda_in_use=in_use,
        cuda_holder=holder,
        open_file=_find(given, _is_open_file) if will_be_copies else "",
    )


def can_fork() -> bool:
    """Return whether this system forks safely.

    macOS offers fork, but its own libraries start threads, and forked processes may crash
    (documentation of Python's multiprocessing).
    """
    return sys.platform != "darwin" and FORK in multiprocessing.get_all_start_methods()


def find_trouble(given: Mapping[str, Any]) -> str:
    """Return why a fresh worker could not start, as a clause; empty where it could."""
    file = str(getattr(sys.modules["__main__"], "__file__", ""))
    if file.startswith("<"):
        return f"the script comes from {file}, where a fresh worker cannot read it again"
    line = find_repeated_line()
    if line:
        return f'{line} is not below if __name__ == "__main__": a fresh worker would run it again'
    for name, thing in given.items():
        before = dict(getattr(thing, "__dict__", {}))
        trouble = find_pickle_trouble(thing)
        if before and not isinstance(thing, type):
            vars(thing).update(before)  # a `__getstate__` may take things out of the object itself
        if trouble:
            return f"{name}: {trouble}"
    return ""


def find_pickle_trouble(thing: Any) -> str:
    """Return why an object cannot be sent to a fresh worker; empty where it can.

    Nothing is kept and no tensor moves to shared memory: a data set may be large.
    """
    hidden = _hidden_names()
    pickler = _Rehearsal(_Nowhere())
    contexts.set_spawning_popen(_Stranger())  # type: ignore[arg-type]
    try:
        pickler.dump(thing)
    except Exception as error:  # noqa: BLE001  pickling runs the user's code: anything may come
        return f"{type(error).__name__}: {error}"
    finally:
        contexts.set_spawning_popen(None)
    lost = sorted(name for name in pickler.of_main if hidden is None or name in hidden)
    return f"{lost[0]} is made where a fresh worker does not come by" if lost else ""


def find_repeated_line() -> str:
    """Return the script's line under way if a fresh worker would run it, too; else empty."""
    main = sys.modules["__main__"]
    if not _is_run_again(main):
        return ""
    lines = [x.f_lineno for x in _frames() if x.f_globals is vars(main) and _is_module(x)]
    # The outermost one is the file itself; others are code that it makes while it runs.
    if not lines or any(lines[-1] in guarded for guarded, _ in _guarded(main)):
        return ""
    return f"line {lines[-1]} of {Path(str(main.__file__)).name}"


def find_cuda(thing: Any) -> str:
    """Return the path to the first CUDA tensor in an object; empty for none.

    The name of a device is none: settings hold it that no worker looks at.
    """
    return _find(thing, _is_on_cuda)


def _find(
    thing: Any, is_wanted: Callable[[Any], bool | None], name: str = "", depth: int = 0
) -> str:
    """Return the path to the first part that is wanted, or ""; one that is None is looked into."""
    found = is_wanted(thing)
    if found is not None:
        return name if found else ""
    below = (
        _find(part, is_wanted, f"{name}.{label}" if name else label, depth + 1)
        for label, part in (_parts(thing) if depth < MAX_DEPTH else ())
    )
    return next(filter(None, below), "")


def _is_on_cuda(thing: Any) -> bool | None:
    import torch

    if isinstance(thing, torch.nn.Module):
        first = next(thing.parameters(), None)
        return first is not None and first.is_cuda
    return thing.is_cuda if isinstance(thing, torch.Tensor) else None


def _is_open_file(thing: Any) -> bool | None:
    if not isinstance(thing, io.IOBase):
        return None
    try:
        return thing.readable() and stat.S_ISREG(os.fstat(thing.fileno()).st_mode)
    except (OSError, ValueError):
        return False  # in memory, or closed


def _parts(thing: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(thing, dict):  # other mappings may read files when they are asked
        return [(str(key), thing[key]) for key in list(thing)[:MAX_ITEMS]]
    if isinstance(thing, list | tuple):
        return [(str(number), part) for number, part in enumerate(thing[:MAX_ITEMS])]
    if isinstance(thing, type):
        return ()
    return list(getattr(thing, "__dict__", {}).items())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_module(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>"


def _is_run_again(main: Any) -> bool:
    """Return whether a fresh process runs the main module.

    Not `python -m package`, nor a prompt.
    """
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return name != "__main__" and not name.endswith(".__main__")
    return getattr(main, "__file__", None) is not None


def _hidden_names() -> frozenset[str] | None:
    """Return what of the main module a fresh worker does not find; None for all of it."""
    main = sys.modules["__main__"]
    if not _is_run_again(main):
        return None
    return frozenset(name for _, names in _guarded(main) for name in names)


def _guarded(main: Any) -> Iterator[tuple[range, list[str]]]:
    """Yield the lines below each main guard, and the classes and functions made there."""
    try:
        tree = ast.parse(Path(str(main.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # compiled, or from an archive
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and _is_guard(node.test):
            made = [x.name for x in node.body if isinstance(x, ast.ClassDef | ast.FunctionDef)]
            yield range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1), made


def _is_guard(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_guard, test.values))
    return isinstance(test, ast.Compare) and ast.unparse(test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    )


class _Nowhere:
    """Takes what is written, and keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _Stranger:
    """Stands for the process to come: locks and shared values are sent only to one."""

    DupFd = staticmethod(int)

    def duplicate_for_child(self, descriptor: int) -> int:
        return descriptor


class _Rehearsal(ForkingPickler):
    """Pickles as for a fresh worker, without the contents of tensors and arrays."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.of_main: set[str] = set()

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, type | FunctionType):
            if thing.__module__ == "__main__":
                self.of_main.add(thing.__qualname__.partition(".")[0])
            return NotImplemented
        return (bool, ()) if _is_plain(thing) else NotImplemented


def _is_plain(thing: Any) -> bool:
    """Return whether something is a tensor or an array that any process can be given."""
    torch, numpy = (sys.modules.get(name) for name in ("torch", "numpy"))
    if torch is not None and isinstance(thing, torch.Tensor):
        return bool(thing.is_leaf or not thing.requires_grad)
    return numpy is not None and isinstance(thing, numpy.ndarray) and not thing.dtype.hasobject


SHARED = ": TypeError: "
"""What pickle says of open files, connections and locks: several copies of a process share the
place in a file. Functions and classes that are only hard to find are other errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A start method, and why flatout took it."""

    method: str
    because: str = ""
    """Empty where the method is what it would be without flatout."""


def choose_start(facts: StartFacts) -> Start:
    """Return the start method for workers that a technique brings in.

    The script's own choice for the loader is kept, and so is what its own workers do. Otherwise the
    usual method, except where its workers could not start: then they are forked, if that can be.

    Raises:
        NotApplicable: if workers can start in no way; the text says what to do.

    >>> choose_start(StartFacts(usual="spawn", trouble="dataset: no pickle")).method
    'fork'
    """
    method = facts.asked or facts.usual
    if facts.has_workers:
        return Start(method=method)
    if method != FORK and facts.trouble:
        return _fork_instead(facts, method)
    if method == FORK and facts.cuda_holder and not facts.asked:
        raise NotApplicable(
            f"{facts.cuda_holder} is on CUDA: a forked worker cannot use it, and a fresh one would "
            "send memory that is gone when the worker ends; keep the samples on the host"
        )
    if method == FORK and facts.open_file:
        raise NotApplicable(
            f"{facts.open_file} is an open file, and forked workers would share the place in it: "
            "open it in each worker"
        )
    return Start(method=method)


def start_with(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loader's arguments with the context in which its workers are to start, if not as is.

    Raises:
        NotApplicable: if its workers can start in no way.
    """
    start = choose_start(start_facts(arguments))
    if not start.because:
        return dict(arguments)
    # A copy: the context itself is one for the whole process, and the reason is this loader's.
    context = copy.copy(multiprocessing.get_context(start.method))
    setattr(context, REASON, start.because)
    return {**arguments, "multiprocessing_context": context}


def start_of(loader: Any) -> Any:
    """Return the context for a built loader that is to get workers; None for the usual one.

    Raises:
        NotApplicable: if its workers can start in no way.
    """
    names = (*GIVEN, "num_workers", "multiprocessing_context")
    return start_with({name: getattr(loader, name) for name in names})["multiprocessing_context"]


def _fork_instead(facts: StartFacts, method: str) -> Start:
    trouble = f"worker processes are spawned here, and {facts.trouble}"
    if facts.asked:
        raise NotApplicable(f"{trouble}; the script chose {method} for this loader itself")
    if SHARED in facts.trouble:
        raise NotApplicable(f"{trouble}; forked workers might share it: open it in each worker")
    if not facts.can_fork:
        raise NotApplicable(f"{trouble}; put that right, since this system does not fork safely")
    if facts.is_cuda_in_use:
        raise NotApplicable(
            f"{trouble}; CUDA is in use, which forked workers cannot use: put that right, or give "
            'the loader multiprocessing_context="fork" if none of them does'
        )
    return Start(method=FORK, because=f"flatout forks them instead of {method}: {facts.trouble}")
