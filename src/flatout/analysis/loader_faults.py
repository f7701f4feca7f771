"""What ended a loader: from the text of a crash or a hang to its cause and what to do about it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flatout.records.catalogue import setter_of
from flatout.records.messages import words
from flatout.records.recipe import Choice, Recipe

SIGBUS = -7


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which loading ends, with the sentence for it."""

    code: str
    """Stable name; each has its section in docs/loader-faults.md, and its message `fault.CODE`: the
    cause and the way out, with groups of the pattern filled in."""
    pattern: str
    unknown: str = ""
    """The message for a group of the pattern that the text does not have."""

    def find(self, text: str) -> re.Match[str] | None:
        """Return where a text mentions it."""
        return re.search(self.pattern, text, re.DOTALL)

    def sentence(self, text: str) -> str:
        """Return the cause as it shows in this text."""
        found = self.find(text)
        unknown = words(self.unknown) if self.unknown else "?"
        groups: dict[str, str] = dict.fromkeys(re.compile(self.pattern).groupindex, unknown)
        groups |= {k: v for k, v in (found.groupdict() if found else {}).items() if v}
        return words("joint.because", one=self.code, other=words(f"fault.{self.code}", **groups))


FETCHING = r"_utils[/\\]fetch\.py(?:(?!\n[\w.]+(?:Error|Exception)\b).)*\n"
"""In a traceback, from the loader's own code to the line of the error it ends with."""
A_PATH = r"(?P<path>'[^'\n]+'|\"[^\"\n]+\")"
KILLED = r"DataLoader worker \(pid\(?s?\)? (?P<pid>[\d, ]+)\) "
OF_WORKERS = frozenset(
    {
        *("shm_full", "open_files", "worker_killed", "worker_crashed", "worker_exited"),
        *("worker_gone", "worker_hung"),
    }
)
"""Faults of which fewer workers may do."""
FAULTS = (
    Fault(
        "shm_full",
        r"Bus error|unable to (allocate shared memory|write to file|open shared memory object|mmap)"
        r"|No space left on device[^\n]*(/torch_|shm)|torch_shm_manager",
    ),
    Fault("open_files", r"Too many open files|received 0 items of ancdata"),
    Fault("worker_killed", KILLED + r"is killed by signal: (?P<signal>Killed)"),
    Fault("worker_crashed", KILLED + r"is killed by signal: (?P<signal>[\w ]+)"),
    Fault("worker_exited", KILLED + r"exited unexpectedly"),
    Fault(
        "worker_gone",
        r"rebuild_storage.*(ConnectionResetError|ConnectionRefusedError|EOFError|FileNotFoundError)",
    ),
    Fault(
        "worker_hung",
        r"DataLoader timed out after (?P<seconds>[\d.]+) seconds|the loop waits for a batch",
    ),
    Fault(
        "not_picklable",
        r"Can't pickle local object|cannot pickle '[^']+' object|Can't get attribute [^\n]+ on "
        r"<module '__mp?_?main__'|PicklingError[^\n]*",
    ),
    Fault("no_main_guard", r"before the\s+current process has finished its bootstrapping phase"),
    Fault(
        "bad_image",
        r"cannot identify image file (<_io\.\w+ name=)?" + A_PATH + "?"
        r"|image file is truncated|broken data stream when reading image file|"
        r"Truncated File Read|broken PNG file",
        unknown="fault.unknown_image",
    ),
    Fault("file_gone", FETCHING + r"FileNotFoundError: \[Errno 2\] [^:\n]*: " + A_PATH),
    Fault(
        "uneven_samples",
        FETCHING + r"RuntimeError: (stack expects each tensor to be equal size, but got "
        r"(?P<sizes>\[[^\]\n]*\] at entry \d+ and \[[^\]\n]*\] at entry \d+)"
        r"|each element in list of batch should be of equal size)",
        unknown="fault.unknown_sizes",
    ),
    Fault("empty_data", r"num_samples should be a positive integer value, but got num_samples=0"),
)
"""Every fault that is told apart, the most telling first."""
BY_CODE: Mapping[str, Fault] = {fault.code: fault for fault in FAULTS}
INNERMOST = re.compile(r"[^<#]*(?:<\w+>)?")
"""Of a loader's address: the file and the function that made it, without those that called."""


def find_fault(text: str, exit_code: int | None = None) -> Fault | None:
    """Return what ended the loader, None where nothing tells of one."""
    if exit_code == SIGBUS:
        return BY_CODE["shm_full"]
    return next((fault for fault in FAULTS if fault.find(text)), None)


NO_DEVICE = re.compile(
    r"Found no NVIDIA driver[^\n.]*|No CUDA GPUs are available|Torch not compiled with CUDA enabled"
    r"|no CUDA-capable device is detected|CUDA driver version is insufficient[^\n.]*"
    r"|The NVIDIA driver on your system is too old[^\n.]*"
    r"|\w+Error: [^\n]*CUDA is not available[^\n.]*"
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
    return words("fault.no_device", said=found[0])


def fewer_workers(recipe: Recipe, code: str | None) -> Choice | None:
    """Return the recipe's workers halved, where a fault says that fewer may do; None otherwise.

    >>> recipe = Recipe(choices=(Choice(technique="loader_workers", settings={"num_workers": 5}),))
    >>> fewer_workers(recipe, "shm_full").settings
    {'num_workers': 2}
    >>> fewer_workers(recipe, "empty_data") is None
    True
    """
    name = setter_of("num_workers")
    chosen = next((choice for choice in recipe.choices if choice.technique == name), None)
    if code not in OF_WORKERS or chosen is None:
        return None
    workers = int(chosen.settings.get("num_workers", 1)) // 2
    if workers < 1:
        return None
    return replace(chosen, settings={**chosen.settings, "num_workers": workers})


def half_of_own_workers(details: Mapping[str, Any]) -> Recipe | None:
    """Return a recipe with half of the script's own workers, where a fault says that fewer may do.

    >>> own = [{"address": "main:1", "num_workers": 16, "prefetch_factor": 4}]
    >>> half_of_own_workers({"fault": "worker_killed", "loaders": own}).label
    'loader_workers num_workers=8 prefetch_factor=4'
    >>> half_of_own_workers({"fault": "empty_data", "loaders": own}) is None
    True
    """
    loaders = details.get("loaders", ())
    workers = max((loader["num_workers"] for loader in loaders), default=0) // 2
    if details.get("fault") not in OF_WORKERS or workers < 1:
        return None
    larger = [loader for loader in loaders if loader["num_workers"] > workers]
    asked = {loader["prefetch_factor"] for loader in larger} - {None}
    settings = {"num_workers": workers} | ({"prefetch_factor": min(asked)} if asked else {})
    return Recipe(
        choices=(Choice(technique=setter_of("num_workers"), settings=settings),),
        training_loaders=tuple(loader["address"] for loader in larger),
    )


def emptiness(loader: Mapping[str, Any]) -> str:
    """Return why a script took no step whose loader ended without having given a batch.

    >>> emptiness({"address": "train.py:main<train.py:<module>#0", "dataset": "Images",
    ...            "dataset_len": 0, "batch_size": 4})
    'the script ended without a training step: its loader of train.py:main had nothing to give, \
the data set Images has no sample'
    """
    name, samples, size = loader["dataset"], loader["dataset_len"], loader["batch_size"]
    if samples == 0:
        why = words("trial.no_sample", name=name)
    elif loader["drop_last"] and size:
        known = {"name": name, "size": str(size)}
        why = words("trial.few_yielded", **known)
        if samples:
            why = words("trial.few_samples", **known, n=str(samples))
    elif loader["is_iterable"]:
        why = words("trial.yields_none", name=name)
    else:
        why = words("trial.none_named", n=str(samples), name=name)
    made_by = INNERMOST.findall(loader["address"])[0]
    return words("trial.empty_loader", place=made_by, why=why)
