"""What an optimizer loaded beside torch's own parts, kept for the lever that wrote it.

A script loads its optimizer before the first step, and levers act in that step: by then torch has
passed over what it does not know.
"""

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OF_TORCH = ("state", "param_groups")
_KEPT: "weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, Any]]]" = weakref.WeakKeyDictionary()
"""By optimizer the handle of its hook, and the parts that it loaded last."""


def keep(optimizer: "torch.optim.Optimizer") -> None:
    """Keep such parts of what an optimizer loads, until they are forgotten."""
    _KEPT[optimizer] = optimizer.register_load_state_dict_pre_hook(_note), {}


def find(optimizer: "torch.optim.Optimizer", name: str) -> Any | None:
    """Return a part of what an optimizer loaded last, or None."""
    _, parts = _KEPT.get(optimizer, (None, {}))
    return parts.get(name)


def forget(optimizer: "torch.optim.Optimizer") -> None:
    """Let the parts go, and keep none from now on: who needs them has them."""
    handle, _ = _KEPT.pop(optimizer, (None, {}))
    if handle is not None:
        handle.remove()


def _note(optimizer: "torch.optim.Optimizer", state: dict[str, Any]) -> None:
    if optimizer in _KEPT:
        handle, _ = _KEPT[optimizer]
        _KEPT[optimizer] = handle, {k: v for k, v in state.items() if k not in OF_TORCH}
