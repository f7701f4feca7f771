"""A Subject: a training step as the tracer needs it, by functions that build its parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.records.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

PRECISIONS = ("bfloat16", "float16")
"""Types that `Subject.autocast` may name, as torch calls them."""
COUNTS = ("batch_size", "accumulate", "world_size")
STEPS = 2
"""Optimizer steps that are traced: the first lacks the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """One training step, described by plain functions. Nothing runs before it is traced."""

    model: Callable[[], "nn.Module"]
    """Build the model, on the host; it is moved to the device, and no weight takes memory."""
    batch: Callable[[int, Any], Any]
    """Return a batch of that many samples on that device: `batch(8, torch.device("cuda"))`."""
    loss: Callable[["nn.Module", Any], "Tensor"]
    """Call the model on one batch and return a scalar to minimise."""
    optimizer: Callable[["nn.Module"], "Optimizer"]
    batch_size: int = 1
    """Samples of a micro-batch, where the caller names no other number."""
    autocast: str | None = None
    """`bfloat16` or `float16`: the loss is computed under autocast; None leaves it as it is."""
    accumulate: int = 1
    """Micro-batches of an optimizer step."""
    scales_gradients: bool = False
    """Whether a GradScaler is between loss and optimizer."""
    clip_norm: float | None = None
    """Gradients are clipped to this norm before the optimizer's step."""
    world_size: int = 1
    """Above 1 a process group of that many ranks is pretended, for `fully_shard` in `model`."""
    mask_share: float = 1.0
    """Share of a mask's elements that are taken to be true where a size depends on them; 1 is the
    upper bound."""
    name: str = "subject"

    def __post_init__(self) -> None:
        for field in COUNTS:
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise UserError(f"{self.name}: {field}={value!r} must be a whole number > 0")
        if self.autocast not in (None, *PRECISIONS):
            raise UserError(
                f"{self.name}: autocast={self.autocast!r}; give one of {', '.join(PRECISIONS)}"
            )
        if not 0 < self.mask_share <= 1:
            raise UserError(f"{self.name}: mask_share={self.mask_share!r}; give a share in (0, 1]")
