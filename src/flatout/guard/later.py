"""What happens after the first steps, whose numbers are compared: plain facts that rounding leaves.

A model that is left in eval mode, or a running average that stands still, shows in no gradient of
the first steps and, with every dropout off, in no loss of the later ones.
"""

from typing import TYPE_CHECKING

from flatout.guard.sketch import buffer_sketch
from flatout.guard.structure import describe_modules, of_root, plain_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

MOVES = "changes after the first step"
RESTS = "stays as the first step left it"


class LaterNotes:
    """Modes and rates at the end of each step, and which buffers go on changing."""

    def __init__(self) -> None:
        self._now: dict[str, str] = {}
        self._modules: dict[str, str] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def buffers(self) -> "Mapping[str, torch.Tensor]":
        """Sketches of the buffers after the first step."""
        return self._buffers

    def after_step(self, step: int, roots: "Sequence[torch.nn.Module]") -> None:
        """Note what changed in the modules; the first step's end is where that begins."""
        if step == 1:
            self._buffers = _sketches(roots)
        for number, root in enumerate(roots):
            for name, line in describe_modules(root, number).items():
                # Not the type: a lever may put another module in its place later on.
                manner = line.partition(" ")[2]
                if self._now.setdefault(name, manner) != manner:
                    self._now[name] = manner
                    self._modules[f"module {name} from step {step} on"] = manner

    def facts(self, steps: int, roots: "Sequence[torch.nn.Module]") -> dict[str, str]:
        """Return what was noted, and for each buffer whether it changed after the first step."""
        if steps < 2:
            return {}
        last = _sketches(roots)
        moves = {
            f"buffer {name}": RESTS if first.cpu().equal(last[name].cpu()) else MOVES
            for name, first in self._buffers.items()
            if name in last and first.shape == last[name].shape
        }
        return self._modules | moves


def _sketches(roots: "Sequence[torch.nn.Module]") -> "dict[str, torch.Tensor]":
    return {
        f"{of_root(number)}{plain_name(name)}": buffer_sketch(buffer, name)
        for number, root in enumerate(roots)
        for name, buffer in root.named_buffers()
    }
