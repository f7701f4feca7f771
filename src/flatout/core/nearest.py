"""Name the nearest valid word for one that is not known."""

import difflib
from collections.abc import Iterable


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """Return the sentence about an unknown word: the nearest one, or all when none is near.

    >>> unknown("technique", "bf16_autocst", ["tf32", "bf16_autocast"])
    "unknown technique 'bf16_autocst'; did you mean 'bf16_autocast'?"
    >>> unknown("setting", "colour", ["threads", "mode"])
    "unknown setting 'colour'; known are: mode, threads"
    """
    words = sorted(known)
    near = difflib.get_close_matches(given, words, n=1)
    if near:
        return f"unknown {kind} {given!r}; did you mean {near[0]!r}?"
    return f"unknown {kind} {given!r}; known are: {', '.join(words) or 'none'}"
