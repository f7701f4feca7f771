"""flatout: your training script, flat out, with proof."""

import importlib
from typing import Any

from flatout.agent.marks import step

__version__ = "0.1.0"
_LAZY = {
    "Task": "flatout.agent.task",
    "apply": "flatout.workflow.apply",
    "check": "flatout.api",
    "compare": "flatout.api",
    "lightning_callback": "flatout.callbacks",
    "measure": "flatout.api",
    "plan": "flatout.api",
    "run": "flatout.api",
    "transformers_callback": "flatout.callbacks",
    "tune": "flatout.api",
}
"""Where each public name is. Imported when asked for: training scripts import flatout too, and
must not load the command line's modules."""
__all__ = ["__version__", "step", *_LAZY]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """Return the public names, so that completion finds those that are not imported yet."""
    return sorted(__all__)
