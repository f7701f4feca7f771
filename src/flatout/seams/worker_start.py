"""How a loader's workers are started, and what lives in the training process at that moment."""

import multiprocessing
import sys
import threading
from typing import Any

FORK = "fork"
REASON = "flatout_reason"
"""On a context that flatout chose: why."""
OURS = "flatout"
"""Threads with this in their names are not the script's."""
MOST_NAMES = 5


def note_start(asked: dict[str, Any], loader: Any) -> None:
    """Note a start of workers that is about to happen; of several starts the worst.

    Args:
        asked: What is known of the loader; gains `start_method`, `start_reason`,
            `cuda_at_start` and `threads_at_start`.
        loader: The loader.
    """
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
    """Tell whether this process holds a CUDA context of torch's; never wakes the driver."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def other_threads() -> list[str]:
    """Return the names of Python's other threads in this process, a few of them."""
    here = threading.current_thread()
    alive = (thread for thread in threading.enumerate() if thread is not here)
    names = sorted(thread.name for thread in alive if not thread.name.startswith(OURS))
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return names[:MOST_NAMES] + more
