"""A Task: what is trained, as a record of functions instead of a script.

flatout writes the loop, so there is nothing to wrap and nothing to forget; `measure`, `tune` and
`run` take `mytask.py:task` wherever they take a script. Importing this module imports no torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.records.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

FUNCTIONS = ("model", "data", "loss", "optimizer", "finish")
COUNTS = ("batch_size", "epochs", "steps", "accum_steps")


def leave(model: "nn.Module") -> None:
    """Do nothing with the trained model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One training, described by plain functions. Nothing runs before the training starts."""

    model: Callable[[], "nn.Module"]
    """Build the model, on the CPU; it is moved to the device afterwards."""
    data: Callable[[], "Dataset[Any] | Iterable[Any]"]
    """Return a data set, which is then shuffled and put into batches, or the batches themselves:
    a `DataLoader`, a list, anything that can be iterated once per epoch."""
    loss: Callable[["nn.Module", Any], "Tensor"]
    """Call the model on one batch, which is on the device, and return a scalar to minimise."""
    optimizer: Callable[["nn.Module"], "Optimizer"]
    """Build the optimizer of the model's parameters."""
    schedule: "Callable[[Optimizer], LRScheduler] | None" = None
    """Build the schedule of the learning rate, which goes on after each step; None for none."""
    batch_size: int
    """Samples of a batch, where `data` returns a data set."""
    collate: Callable[[list[Any]], Any] | None = None
    """Make a batch of samples; None stacks them as `DataLoader` does."""
    epochs: int = 1
    steps: int | None = None
    """Train exactly this many steps, in as many epochs as they take; None goes by `epochs`."""
    device: str | None = None
    """Where to train; None takes the accelerator that torch sees, else the CPU."""
    accum_steps: int = 1
    """Parts of a batch whose gradients are added up for one step: the largest batch that fits is
    one part, and the step is that of the whole."""
    weight: "Callable[[Any], float | Tensor] | None" = None
    """What a part of a batch counts in the mean, where its loss is one: the number of its tokens
    that have a target. None counts samples."""
    seed: int = 0
    """Seeds Python, numpy and torch before the model is built."""
    name: str = "task"
    finish: Callable[["nn.Module"], None] = leave
    """What to do with the trained model: evaluate it, save it."""

    def __post_init__(self) -> None:
        for field in FUNCTIONS:
            value = getattr(self, field)
            if not callable(value):
                raise UserError(
                    f"Task {self.name!r}: {field}={value!r} is a {type(value).__name__} and not a "
                    f"function; flatout calls it in a fresh process, so give a function"
                )
        for field in COUNTS:
            value = getattr(self, field)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"Task {self.name!r}: {field}={value!r} must be a whole number > 0")
