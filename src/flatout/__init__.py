"""flatout: your training script, flat out, with proof."""

from typing import Any

from flatout.agent.marks import step

__version__ = "0.1.0"
__all__ = ["Task", "__version__", "step"]


def __getattr__(name: str) -> Any:
    """Import `Task` when it is asked for: the engine is above everything that imports flatout."""
    if name != "Task":
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    import importlib

    return importlib.import_module("flatout.agent.task").Task
