"""The two exceptions that cross layers, and sentences on unknown words and spent memory."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from flatout.records.units import format_bytes


class UserError(ValueError):
    """A mistake the user can fix: one clear line with what to do next, exit code 2."""


class NotApplicable(Exception):  # noqa: N818  an answer, not an error
    """A technique has nothing to do here; the text says why. Not a failure."""


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """Return the sentence about an unknown word: the nearest one, or all when none is near.

    >>> unknown("technique", "bf16_autocst", ["tf32", "bf16_autocast"])
    "unknown technique 'bf16_autocst'; did you mean 'bf16_autocast'?"
    >>> unknown("setting", "colour", ["threads", "mode"])
    "unknown setting 'colour'; known are: mode, threads"
    >>> unknown("rule", "x", [])
    "unknown rule 'x'; known are: none"
    """
    words = sorted(known)
    near = difflib.get_close_matches(given, words, n=1)
    if near:
        return f"unknown {kind} {given!r}; did you mean {near[0]!r}?"
    return f"unknown {kind} {given!r}; known are: {', '.join(words) or 'none'}"


OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|can't allocate memory|MemoryError|cudaErrorMemoryAllocation"
    r"|(CUDA|HIP|[Cc]uda failure)[^\n]{0,40}out of memory"
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
)
"""Python's, the CPU allocator's, the device allocator's, the driver's and Triton's, the device
libraries' (they ask the driver themselves), NCCL's."""


def is_out_of_memory(text: str) -> bool:
    """Return whether an exception's name or words say that memory ran out.

    >>> is_out_of_memory("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ...")
    True
    >>> is_out_of_memory("RuntimeError: CUDA error: an illegal memory access was encountered")
    False
    """
    return OUT_OF_MEMORY.search(text) is not None


def describe_exhaustion(noted: Mapping[str, Any]) -> str:
    """Return where memory ran out, which component grew most, and what held how much.

    >>> describe_exhaustion({
    ...     "phase": "forward", "step": 9, "before": {"parameters": 2**30}, "since": 3,
    ...     "components": {"parameters": 2**30, "gradients": 2**29},
    ... })
    'in forward of step 9; gradients grew by 512.0 MiB since step 3; held were parameters \
1.00 GiB, gradients 512.0 MiB'
    """
    # Here: the training's process, which asks whether memory ran out, may lack what reads messages.
    from flatout.records.messages import joined, named, words

    components = noted["components"]
    before = noted.get("before") or {}
    growth = {name: size - before.get(name, 0) for name, size in components.items()}
    name = max(growth, key=lambda each: growth[each], default="")
    where = words("exhaustion.where", phase=named("phase", noted["phase"]), n=str(noted["step"]))
    sizes = sorted(components.items(), key=lambda item: -item[1])
    held = tuple(
        words("exhaustion.part", name=named("component", each), size=format_bytes(size))
        for each, size in sizes
        if size
    )
    said = [words("exhaustion.held", parts=held)] if held else []
    if name and growth[name] > 0:
        grew = "exhaustion.grew" if before else "exhaustion.grew_from_start"
        size = format_bytes(growth[name])
        since = str(noted["since"])
        said.insert(0, words(grew, name=named("component", name), size=size, n=since))
    return joined(where, *said)
