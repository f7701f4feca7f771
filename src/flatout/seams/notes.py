"""Notes of a training process in the trial's folder: they tell it where no result is written."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ELSEWHERE = "elsewhere"
"""A thread other than the main one trains."""
EMPTY = "empty"
"""A loader came to its end and had not given a batch."""


def leave_note(spec: Mapping[str, Any], name: str, found: Mapping[str, Any]) -> None:
    """Note something once under a name; a process without a trial's folder notes nothing."""
    if not spec.get("folder"):
        return
    path = Path(spec["folder"]) / f"{name}-{os.getpid()}.json"
    with contextlib.suppress(OSError):  # the trial is over
        if not path.exists():
            path.write_text(json.dumps(found), encoding="utf-8")
