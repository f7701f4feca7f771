"""Choose how worker processes start that a lever brings in, with the reason in words."""

import copy
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatout.core.errors import NotApplicable
from flatout.seams.start_facts import GIVEN, StartFacts, start_facts
from flatout.seams.worker_start import FORK, REASON

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
    """Return the start method for workers that a lever brings in.

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
        raise NotApplicable(f"{trouble}; mend that, since this system does not fork safely")
    if facts.is_cuda_in_use:
        raise NotApplicable(
            f"{trouble}; CUDA is in use, which forked workers cannot use: mend that, or give the "
            'loader multiprocessing_context="fork" if none of them does'
        )
    return Start(method=FORK, because=f"flatout forks them instead of {method}: {facts.trouble}")
