"""Faults that a recipe could bring in: each changes a setting, and names what must see it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.guard.loop import Batch, Setting

PLAIN = Setting()
CLIPPED = Setting(clip=0.05)
"""Clipping that is active in every training."""
SCALED = Setting(clip=0.05, scaled=True)
ACCUMULATED = Setting(accumulate=2)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault on top of a baseline's setting."""

    change: dict[str, Any]
    seen_by: set[str]
    """Checks of which at least one must fire."""
    baseline: Setting = PLAIN
    cases: tuple[str, ...] = ("mlp", "conv", "gpt", "lstm")
    steps: int = 5
    """Enough for it to show, in bf16."""

    @property
    def setting(self) -> Setting:
        """The baseline's setting with the fault."""
        return replace(self.baseline, **self.change)


def freeze_first(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(requires_grad=False)


def zero_last_in_backward(model: nn.Module) -> None:
    _last_weight(model).register_hook(torch.zeros_like)


def scale_last_in_backward(model: nn.Module) -> None:
    _last_weight(model).register_hook(lambda gradient: 1.5 * gradient)


def scale_last_after_backward(model: nn.Module) -> None:
    _last_weight(model).grad.mul_(1.5)


def _last_weight(model: nn.Module) -> Any:
    return [p for p in model.parameters() if p.dim() > 1][-1]


def swap_labels(_step: int, batch: Batch) -> Batch:
    x, y = batch
    return x, y.roll(1, 0)


def repeat_half(_step: int, batch: Batch) -> Batch:
    half = len(batch[0]) // 2
    x, y = batch
    return torch.cat([x[:half], x[:half]]), torch.cat([y[:half], y[:half]])


def repeat_one(_step: int, batch: Batch) -> Batch:
    x, y = batch
    return torch.cat([x[:1], x[:-1]]), torch.cat([y[:1], y[:-1]])


class SameBatch:
    """Give the first batch at every step."""

    def __init__(self) -> None:
        self.first: Batch | None = None

    def __call__(self, step: int, batch: Batch) -> Batch:
        if step == 0:
            self.first = batch
        assert self.first is not None
        return self.first


def norms_to_eval(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


class LaterEval:
    """Leave the model in eval mode from a step on whose numbers are not compared."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.calls = 0

    def __call__(self, model: nn.Module) -> None:
        self.calls = self.calls + 1 if model is self.model else 1
        self.model = model
        if self.calls > 5:
            model.eval()


class RestingNorms:
    """Set running averages back to what the first step made of them, as a stale replay would."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.first: dict[str, torch.Tensor] = {}

    def __call__(self, model: nn.Module) -> None:
        if model is not self.model:
            self.model, self.first = model, {}
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(self.first.setdefault(name, buffer.clone()))


def replace_last_parameter(model: nn.Module) -> None:
    """Leave the optimizer with a parameter that the model no longer has."""
    name = [name for name, p in model.named_parameters() if p.dim() > 1][-1]
    owner = model.get_submodule(name.rpartition(".")[0])
    short = name.rpartition(".")[2]
    setattr(owner, short, nn.Parameter(getattr(owner, short).detach().clone()))


def checkpoint_all(model: nn.Module) -> None:
    inner = model.forward
    model.forward = lambda x: checkpoint(inner, x, use_reentrant=False)  # type: ignore[method-assign]


FAULTS = {
    "frozen layer": Fault(change={"prepare": freeze_first}, seen_by={"tensors"}),
    "gradient of one tensor lost": Fault(
        change={"prepare": zero_last_in_backward}, seen_by={"gradient"}
    ),
    "gradient of one tensor times 1.5": Fault(
        change={"prepare": scale_last_in_backward}, seen_by={"gradient"}
    ),
    "gradient of one tensor times 1.5 after backward": Fault(
        change={"after_backward": scale_last_after_backward}, seen_by={"clipped_gradient"}
    ),
    "accumulation without division": Fault(
        baseline=ACCUMULATED, change={"divide": False}, seen_by={"gradient"}
    ),
    "labels shuffled in the loader": Fault(change={"load": swap_labels}, seen_by={"samples"}),
    "labels shuffled behind the loader": Fault(change={"feed": swap_labels}, seen_by={"gradient"}),
    "half a batch twice in the loader": Fault(change={"load": repeat_half}, seen_by={"samples"}),
    "half a batch twice behind the loader": Fault(
        change={"feed": repeat_half}, seen_by={"samples", "gradient"}
    ),
    "one sample twice": Fault(change={"load": repeat_one}, seen_by={"samples"}),
    "same batch every step": Fault(
        change={"feed": SameBatch()}, seen_by={"samples", "second_gradient"}
    ),
    "clipping before unscaling": Fault(
        baseline=SCALED, change={"unscale": False}, seen_by={"clipped_gradient"}
    ),
    "clipping dropped": Fault(baseline=CLIPPED, change={"clip": 0.0}, seen_by={"clipped_gradient"}),
    "learning rate twice": Fault(
        change={"optimizer": (("lr", 2e-3),)}, seen_by={"settings", "update"}
    ),
    "learning rate 1 % more": Fault(
        change={"optimizer": (("lr", 1.01e-3),)}, seen_by={"settings", "update"}
    ),
    "weight decay dropped": Fault(
        change={"optimizer": (("weight_decay", 0.0),)}, seen_by={"settings", "update"}
    ),
    "other epsilon": Fault(change={"optimizer": (("eps", 1e-4),)}, seen_by={"settings", "update"}),
    "other beta2": Fault(
        change={"optimizer": (("betas", (0.9, 0.99)),)}, seen_by={"settings", "update"}
    ),
    "Adam for AdamW": Fault(
        change={"kind": torch.optim.Adam, "optimizer": (("weight_decay", 0.01),)},
        seen_by={"settings", "update"},
    ),
    "zero_grad forgotten": Fault(
        change={"zero_grad": False}, seen_by={"second_gradient", "tensors"}
    ),
    "stale parameter in the optimizer": Fault(
        change={"replace": replace_last_parameter}, seen_by={"tensors", "update"}
    ),
    "BatchNorm in eval mode": Fault(
        change={"at_forward": norms_to_eval},
        seen_by={"structure", "gradient", "buffers"},
        cases=("conv",),
    ),
    "checkpointing over BatchNorm": Fault(
        change={"prepare": checkpoint_all}, seen_by={"buffers"}, cases=("conv",)
    ),
    "eval mode from step 6 on": Fault(
        change={"at_forward": LaterEval()}, seen_by={"structure"}, cases=("mlp", "gpt"), steps=20
    ),
    "BatchNorm's averages rest after step 1": Fault(
        change={"after_backward": RestingNorms()}, seen_by={"buffers"}, cases=("conv",), steps=20
    ),
    "accumulation over BatchNorm": Fault(
        change={"accumulate": 2}, seen_by={"gradient", "buffers"}, cases=("conv",)
    ),
}
UPDATE_FAULTS = (
    "learning rate twice",
    "learning rate 1 % more",
    "weight decay dropped",
    "other epsilon",
    "other beta2",
    "Adam for AdamW",
)
"""Faults of the optimizer, which its shadow must see without reading any setting."""
