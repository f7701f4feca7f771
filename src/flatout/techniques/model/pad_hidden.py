"""Compute linear layers of odd widths with zeros alongside them, on widths that kernels take.

What it does: pads weight and input of such layers with zeros inside of their forward, to multiples
of 8, and cuts the extra columns off. Parameters, keys and shapes stay as they are.
When it helps: hidden sizes that are no multiple of 8 in low precision on a GPU, where rows that are
not aligned use slower kernels. A compiled model has this already.
What it costs: a copy of the weight, and of input or output, in each step.
How it is checked: outputs and gradients match up to rounding: zeros add nothing.
"""

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent.describe import ALIGNED, odd_layers
from flatout.analysis.regime import COMPUTE_CAUSES, addressable_ms
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import ModelFacts, Profile
from flatout.records.technique import Effect, Numerics, Technique, prior_for

if TYPE_CHECKING:
    import torch

MIN_SHARE = 0.05
"""Of the model's weights in such layers: less is no part of the step that shows."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PadHidden(Technique):
    """Pad linear layers of odd widths inside of their forward."""

    family: ClassVar[str] = "model"
    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    by_hand: ClassVar[str] = """
Where the layers are made, best for a model that is trained from scratch:
- self.up = nn.Linear(width, 1365)
+ self.up = nn.Linear(width, 1408)
"""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["PadHidden"]:
        """Return the technique for GPUs and eager models with many weights in odd layers."""
        del machine
        is_gpu = profile.device_kind == "cuda"
        return [cls()] if is_gpu and any(_share(m) >= MIN_SHARE for m in profile.models) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the odd layers' share of the products to shrink by its prior."""
        del machine
        compute_ms = addressable_ms(profile, ("forward", "backward"), COMPUTE_CAUSES)
        share = max(map(_share, profile.models), default=0.0)
        return Effect(
            step_ms=-compute_ms * share * (1 - 1 / prior_for(self, profile).speedup),
            why=f"layers with {share:.0%} of the weights on aligned widths",
        )

    def model(self, root: Any) -> Any:
        """Pad the odd layers' forwards."""
        if not pad_layers(root):
            raise NotApplicable(f"all widths but the last are multiples of {ALIGNED} already")
        return root


def pad_layers(model: "torch.nn.Module") -> int:
    """Let odd linear layers compute padded; they give what they gave. Return how many."""
    from torch import nn
    from torch.nn import functional

    # Named so because a pickle keeps the name alone: what loads is the class's own forward.
    def forward(self: nn.Linear, x: "torch.Tensor") -> "torch.Tensor":
        inner, outer = -self.in_features % ALIGNED, -self.out_features % ALIGNED
        weight = functional.pad(self.weight, (0, inner, 0, outer))
        bias = None if self.bias is None else functional.pad(self.bias, (0, outer))
        output = functional.linear(functional.pad(x, (0, inner)) if inner else x, weight, bias)
        return output[..., : self.out_features].contiguous() if outer else output

    layers = [layer for layer in odd_layers(model) if "forward" not in vars(layer)]
    for layer in layers:
        layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _share(model: ModelFacts) -> float:
    if model.is_compiled or not model.parameters:
        return 0.0
    return min(0.9, model.odd_parameters / model.parameters)
