"""Measure in a fresh process: torch is not imported here, and no context stays on a device."""

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from flatout.core.boot import module_command, with_boot


def ask_module(
    python: str, module: str, words: Sequence[str] = (), *, job: Any = None, limit_s: float
) -> Any:
    """Run a module of flatout's by another Python, and return the JSON of its last line.

    Args:
        python: the interpreter; it needs torch, but flatout need not be installed there.
        module: dotted name; run as by `python -m`, but not out of the current folder.
        words: its arguments.
        job: what it reads as JSON from its standard input.
        limit_s: how long it may take.

    Raises:
        ValueError: if it takes longer or fails; ends with its own last line.
    """
    try:
        done = subprocess.run(
            module_command(python, module, *words),
            env=with_boot(os.environ),
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"measuring took over {limit_s:.0f} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ValueError(f"measuring failed: {last[0][:200]}")
    return json.loads(done.stdout.splitlines()[-1])
