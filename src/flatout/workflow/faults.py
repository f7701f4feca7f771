"""What ended a loader: from the text of a crash or a hang to its cause and what to do about it."""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatout.core.recipe import Choice, Recipe

SIGBUS = -7


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way in which loading ends, with the sentence for it."""

    code: str
    """Stable name; each has its section in docs/loader-faults.md."""
    pattern: re.Pattern[str]
    because: str
    """The cause and the way out; groups of the pattern may be filled in."""
    is_of_workers: bool = False
    """Whether fewer workers may do."""

    def sentence(self, text: str) -> str:
        """Return the cause as it shows in this text."""
        found = self.pattern.search(text)
        named = dict.fromkeys(self.pattern.groupindex, "?")
        named |= {k: v for k, v in (found.groupdict() if found else {}).items() if v}
        return f"{self.code}: {self.because.format(**named)}"


def _fault(code: str, pattern: str, because: str, *, is_of_workers: bool = False) -> Fault:
    compiled = re.compile(pattern, re.DOTALL)
    return Fault(code=code, pattern=compiled, because=because, is_of_workers=is_of_workers)


KILLED = r"DataLoader worker \(pid\(?s?\)? (?P<pid>[\d, ]+)\) "
FAULTS = (
    _fault(
        "shm_full",
        r"Bus error|unable to (write to file|open shared memory object|mmap)[^\n]*"
        r"|No space left on device[^\n]*(/torch_|shm)|torch_shm_manager",
        "/dev/shm is too small for the batches of the loader's workers: fewer workers or a lower "
        "prefetch_factor need less of it, a container gets more with --shm-size=8g, and "
        'torch.multiprocessing.set_sharing_strategy("file_system") with TMPDIR on a disk avoids '
        "running out of descriptors, not of this memory",
        is_of_workers=True,
    ),
    _fault(
        "open_files",
        r"Too many open files|received 0 items of ancdata",
        "the loader's workers ran out of file descriptors: raise the limit with ulimit -n 65536, "
        'or call torch.multiprocessing.set_sharing_strategy("file_system") at the start',
        is_of_workers=True,
    ),
    _fault(
        "worker_killed",
        KILLED + r"is killed by signal: (?P<signal>Killed)",
        "loader worker {pid} was killed: out of memory, unless somebody else did it; each worker "
        "holds what the data set copies and its prefetched batches, so fewer workers need less",
        is_of_workers=True,
    ),
    _fault(
        "worker_crashed",
        KILLED + r"is killed by signal: (?P<signal>[\w ]+)",
        "loader worker {pid} crashed ({signal}) in a library that __getitem__ calls: run the "
        "script with num_workers=0 under python -X faulthandler to see the line",
        is_of_workers=True,
    ),
    _fault(
        "worker_exited",
        KILLED + r"exited unexpectedly",
        "loader worker {pid} ended by itself: something that __getitem__ calls leaves the process; "
        "num_workers=0 shows what it prints",
        is_of_workers=True,
    ),
    _fault(
        "worker_gone",
        r"rebuild_storage.*(ConnectionResetError|ConnectionRefusedError|EOFError|FileNotFoundError)",
        "a loader worker was gone before its batch was received, and left no word: it was killed, "
        "crashed, or left by itself; num_workers=0 shows which",
        is_of_workers=True,
    ),
    _fault(
        "worker_hung",
        r"DataLoader timed out after (?P<seconds>[\d.]+) seconds|the loop waits for a batch",
        "a loader worker gives no batch: look at what __getitem__ waits for (a lock taken before "
        "the fork, a network mount, a child process); py-spy dump --pid shows its line",
        is_of_workers=True,
    ),
    _fault(
        "not_picklable",
        r"Can't pickle local object|cannot pickle '[^']+' object|Can't get attribute [^\n]+ on "
        r"<module '__mp?_?main__'|PicklingError[^\n]*",
        "the data set, collate_fn or worker_init_fn cannot be sent to a spawned worker: move its "
        "functions and classes to the top of a module, open files and connections in the worker, "
        'or start workers with multiprocessing_context="fork"',
    ),
    _fault(
        "no_main_guard",
        r"before the\s+current process has finished its bootstrapping phase",
        "spawned workers import the script anew and train in it: put what it does below "
        'if __name__ == "__main__":',
    ),
    _fault(
        "empty_data",
        r"num_samples should be a positive integer value, but got num_samples=0",
        "the data set is empty: it has no sample, so look at the path and the filter it was made "
        "with",
    ),
)
"""Every fault that is told apart, the most telling first."""
BY_CODE: Mapping[str, Fault] = {fault.code: fault for fault in FAULTS}
WORKER_LEVER = "loader_workers"


def find_fault(text: str, exit_code: int | None = None) -> Fault | None:
    """Return what ended the loader, None where nothing tells of one."""
    if exit_code == SIGBUS:
        return BY_CODE["shm_full"]
    return next((fault for fault in FAULTS if fault.pattern.search(text)), None)


NO_DEVICE = re.compile(
    r"Found no NVIDIA driver[^\n.]*|No CUDA GPUs are available|Torch not compiled with CUDA enabled"
    r"|no CUDA-capable device is detected|CUDA driver version is insufficient[^\n.]*"
    r"|The NVIDIA driver on your system is too old[^\n.]*"
)
"""What torch and the driver say where a script asks for a device that they do not find."""


def find_missing_device(text: str) -> str | None:
    """Return what a crash for want of a CUDA device means, None for any other crash.

    >>> find_missing_device("RuntimeError: No CUDA GPUs are available")
    'the script asks for a CUDA device and torch finds none here (No CUDA GPUs are available); \
flatout doctor says why'
    """
    found = NO_DEVICE.search(text)
    if found is None:
        return None
    return (
        f"the script asks for a CUDA device and torch finds none here ({found[0]}); "
        "flatout doctor says why"
    )


def fewer_workers(recipe: Recipe, code: str | None) -> Choice | None:
    """Return the recipe's workers halved, where a fault says that fewer may do; None otherwise.

    >>> recipe = Recipe(choices=(Choice(technique="loader_workers", settings={"num_workers": 5}),))
    >>> fewer_workers(recipe, "shm_full").settings
    {'num_workers': 2}
    >>> fewer_workers(recipe, "empty_data") is None
    True
    """
    fault = BY_CODE.get(code or "")
    chosen: Sequence[Choice] = [c for c in recipe.choices if c.technique == WORKER_LEVER]
    if fault is None or not fault.is_of_workers or not chosen:
        return None
    workers = int(chosen[0].settings.get("num_workers", 1)) // 2
    if workers < 1:
        return None
    return Choice(technique=WORKER_LEVER, settings={**chosen[0].settings, "num_workers": workers})


def signal_name(exit_code: int) -> str:
    """Return the name of the signal behind a negative exit code."""
    return signal.strsignal(-exit_code) or f"signal {-exit_code}"
