"""Compute the output layer with a vocabulary padded to what tensor cores take.

What it does: pads the last linear layer's weight with zeros inside its forward, to a multiple of
64, and returns its output without the extra columns. Parameters, keys and shapes stay as they are.
When it helps: odd vocabularies (GPT-2's 50257) in low precision, where unaligned rows use slower
kernels; torch.compile pads some of the products only.
What it costs: a copy of the weight in each step. The output is a part of wider rows.
How it is checked: gradients match up to rounding: the added columns are zero.
"""

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.analysis.regime import COMPUTE_CAUSES, addressable_ms
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import ModelFacts, Profile
from flatout.records.technique import (
    Effect,
    Numerics,
    RunningTraining,
    Switch,
    Technique,
    prior_for,
)

if TYPE_CHECKING:
    import torch

MULTIPLE = 64
"""Of 16-byte alignment (8 in bf16) and of the tiles' width."""
MIN_VOCABULARY = 4096
"""A smaller output layer is no part of the step that shows: an assumption."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PadVocabulary(Technique):
    """Pad the output layer inside its forward."""

    partners: ClassVar[frozenset[str]] = frozenset({"precision"})
    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    by_hand: ClassVar[str] = """
Where the output layer is made, best for a model that is trained from scratch:
- head = nn.Linear(width, 50257)
+ head = nn.Linear(width, 50304)
"""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["PadVocabulary"]:
        """Return the technique for models with a large odd output layer."""
        return [cls()] if any(map(_is_odd, profile.models)) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the output layer's share of the products to shrink by its prior."""
        compute_ms = addressable_ms(profile, ("forward", "backward"), COMPUTE_CAUSES)
        share = max((head_share(m) for m in profile.models if _is_odd(m)), default=0.0)
        share = min(share, 0.9)
        return Effect(
            step_ms=-compute_ms * share * (1 - 1 / prior_for(self, profile).speedup),
            why=f"the output layer, some {100 * share:.0f} % of the products, on aligned columns",
        )

    def model(self, root: Any) -> Any:
        """Pad the last linear layer's forward."""
        (layer,) = output_layers([root])
        pad_output(layer)
        return root

    def switch(self, training: RunningTraining) -> Switch:
        """Choose between the last linear layer's forward and the padded one."""
        layers = output_layers(training.roots)
        padded = [(layer, pad_output(layer).__dict__.pop("forward")) for layer in layers]

        def turn(is_on: bool) -> None:  # noqa: FBT001  called by position
            for layer, forward in padded:
                if is_on:
                    layer.forward = forward  # type: ignore[method-assign]
                else:
                    del layer.forward

        return Switch(turn=turn)


def output_layers(roots: Sequence[Any]) -> "list[torch.nn.Linear]":
    """Return the last linear layers of models, as far as they are large.

    Raises:
        NotApplicable: if none is.
    """
    from torch import nn

    last = [[m for m in root.modules() if isinstance(m, nn.Linear)][-1:] for root in roots]
    found = [layer for layers in last for layer in layers if layer.out_features >= MIN_VOCABULARY]
    if not found:
        raise NotApplicable(f"the model has no output layer of {MIN_VOCABULARY} or more")
    return found


def pad_output(layer: "torch.nn.Linear", multiple: int = MULTIPLE) -> "torch.nn.Linear":
    """Let a linear layer compute with its output padded to a multiple; it gives what it gave.

    Raises:
        NotApplicable: if it is aligned already, or no plain linear layer.
    """
    from torch import nn
    from torch.nn import functional

    missing = -layer.out_features % multiple
    if not missing:
        raise NotApplicable(f"{layer.out_features} columns are a multiple of {multiple} already")
    if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
        raise NotApplicable("the output layer has a forward of its own")

    def forward(self: nn.Linear, x: "torch.Tensor") -> "torch.Tensor":
        weight = functional.pad(self.weight, (0, 0, 0, missing))
        bias = None if self.bias is None else functional.pad(self.bias, (0, missing))
        return functional.linear(x, weight, bias)[..., : self.out_features]

    layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]
    return layer


def head_share(model: ModelFacts) -> float:
    """Return the output layer's share of a model's products: that of its weights."""
    return model.head_parameters / model.parameters if model.parameters else 0.0


def _is_odd(model: ModelFacts) -> bool:
    size = model.widest_output
    return size >= MIN_VOCABULARY and size % MULTIPLE != 0


KOREAN = """
Pad the output layer inside its forward.
    출력층을 forward 안에서 패딩합니다.
Where the output layer is made, best for a model that is trained from scratch:
    출력층을 만드는 곳. 처음부터 학습하는 모델에 가장 좋습니다:
the output layer, some {share} % of the products, on aligned columns
    행렬 곱의 약 {share} %인 출력층을 정렬된 열로 계산합니다
the model has no output layer of {n} or more
    모델에 출력이 {n}개 이상인 출력층이 없습니다
{n} columns are a multiple of {multiple} already
    열 {n}개가 이미 {multiple}의 배수입니다
the output layer has a forward of its own
    출력층에 자체 forward가 있습니다
"""
