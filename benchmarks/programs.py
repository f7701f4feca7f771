"""Run a program to its end, and have what it wrote as text."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Ended = subprocess.CompletedProcess[str]


def ran(words: Sequence[str | Path], *, check: bool = False, **options: Any) -> Ended:
    """Return a program that has ended."""
    return ran(words, check=check, **options)


def python(words: Sequence[str | Path], **options: Any) -> Ended:
    """Return the same of this interpreter."""
    return ran([sys.executable, *words], **options)
