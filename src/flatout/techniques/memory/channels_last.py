"""Store images and convolution weights with the channels last.

What it does: converts a convolutional root module and the 4-d inputs of its training calls to the
memory format that convolution kernels prefer, and lays the optimizer's states out like the weights.
When it helps: convolutions dominate; most with bf16 as well.
What it costs: nothing if every operation keeps the format; one that does not converts it back.
How it is checked: gradients match up to rounding. Dropout draws other masks.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, final

from flatout.agent import patching
from flatout.agent.describe import is_compiled
from flatout.agent.nested import map_leaves
from flatout.analysis.regime import COMPUTE_CAUSES, addressable_ms
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    Numerics,
    RunningTraining,
    SourceForm,
    Switch,
    Technique,
    prior_for,
    process_state,
)

if TYPE_CHECKING:
    import torch

Output = TypeVar("Output")


Strays = list[tuple[list[str], int]]
"""Of the latest first call the convolutions that were given the other format, and of how many."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelsLast(Technique):
    """Store images and convolution weights with the channels last."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    moves_random_stream: ClassVar[bool] = True
    partners: ClassVar[frozenset[str]] = frozenset({"precision"})
    by_hand: ClassVar[str] = """
Once the model is on its device, and for each batch of images:
+ model = model.to(memory_format=torch.channels_last)
+ images = images.to(memory_format=torch.channels_last)
"""
    source: ClassVar[SourceForm | None] = SourceForm(
        model="$model.to(memory_format=torch.channels_last)"
    )

    strays: "Strays" = process_state(list)
    reasons: list[str] = process_state(list)
    """Of each root why it was left alone; empty for one that was converted."""
    following: "weakref.WeakSet[torch.optim.Optimizer]" = process_state(weakref.WeakSet)
    """Optimizers whose states are as the weights do."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ChannelsLast"]:
        """Return the technique for models with 2-d convolutions in another format."""
        is_useful = any(m.conv_weights and not m.is_channels_last for m in profile.models)
        return [cls()] if is_useful else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect forward and backward to shrink by its prior, or by what converts layouts now."""
        compute_ms = addressable_ms(profile, ("forward", "backward"), COMPUTE_CAUSES)
        weights = sum(model.conv_weights for model in profile.models)
        converting = (profile.trace.layout_conversion_share if profile.trace else None) or 0.0
        why = f"{weights} convolutions in the format their kernels prefer"
        return Effect(
            step_ms=-compute_ms * max(1 - 1 / prior_for(self, profile).speedup, converting),
            why=f"{why}; {converting:.0%} of the kernels' time converts" if converting else why,
        )

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Convert the root in place, and the inputs of its calls."""
        reason = find_obstacle(root)
        self.reasons.append(reason or "")
        if reason is not None:
            raise NotApplicable(reason)
        store_channels_last(root)
        for optimizer in self.following:
            lay_out_states(optimizer)
        call = call if is_compiled(root) else noting(call, root, self.strays)
        return with_channels_last_inputs(call)

    def switch(self, training: RunningTraining) -> Switch:
        """Convert weights, gradients and states at the switch, inputs in the calls."""
        roots = [root for root in training.roots if find_obstacle(root) is None]
        if not roots:
            raise NotApplicable(str(find_obstacle(training.roots[0])))

        def turn(is_on: bool) -> None:  # noqa: FBT001  called by position
            for root in roots:
                convert(root, is_channels_last=is_on)
            for optimizer in training.optimizers:
                lay_out_states(optimizer)

        return Switch(
            turn=turn,
            call=lambda call, root: with_channels_last_inputs(call) if root in roots else call,
        )

    def optimizer(self, optimizer: Any) -> Any:
        """Lay out what it loaded, or loads later, like the weights."""
        follow_weights(optimizer)
        self.following.add(optimizer)
        # A script may step once before its model is called, which silences schedulers.
        if self.reasons and all(self.reasons):
            raise NotApplicable(self.reasons[0])
        return optimizer

    def end(self) -> str:
        """Say how many convolutions were given the other format: what is before undoes it."""
        if not self.reasons:
            raise NotApplicable("no training call of a model was seen")
        strays, count = self.strays.pop() if self.strays else ([], 0)
        if not strays:
            return ""
        what = f"{len(strays)} of {count} convolutions were given images with the channels first"
        return f"{what}, and convert them each time, among them {strays[0]}"


def find_obstacle(root: "torch.nn.Module") -> str | None:
    """Return why a model has nothing to convert, or None."""
    weights = convolution_weights(root)
    if not weights:
        return "nothing to change: the model has no 2-d convolutions"
    if all(map(is_channels_last, weights)):
        return "nothing to change: the model is channels_last already"
    return None


def noting(
    call: Callable[..., Output], root: "torch.nn.Module", noted_in: "Strays"
) -> Callable[..., Output]:
    """Return the call, whose first run notes which convolutions are given the other format.

    Not for compiled models: what is inside of them is not called as it is there.
    """

    def noted(*args: Any, **kwargs: Any) -> Output:
        named = [(name, m) for name, m in root.named_modules() if isinstance(m, _kinds())]
        strays: list[str] = []
        noted_in[:] = [(strays, len(named))]
        hooks = [
            module.register_forward_pre_hook(functools.partial(_look, strays, name))
            for name, module in named
        ]
        try:
            return call(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    return patching.at_first_call(call, noted)


def _look(strays: list[str], name: str, _module: Any, given: tuple[Any, ...]) -> None:
    # Of one channel or one pixel both formats are the same.
    if given and given[0].dim() == 4 and not is_channels_last(given[0]):
        strays.append(name)


def store_channels_last(model: "torch.nn.Module") -> "torch.nn.Module":
    """Convert the model's 4-d parameters and buffers in place; parameters stay the same objects."""
    import torch

    _store(model, torch.channels_last)
    return model


def convert(model: "torch.nn.Module", *, is_channels_last: bool) -> None:
    """Convert 4-d parameters, buffers and gradients in place to either format.

    Gradients too: a script may add to them, and fused kernels walk them side by side with weights.
    """
    import torch

    wanted = torch.channels_last if is_channels_last else torch.contiguous_format
    _store(model, wanted)
    for parameter in model.parameters():
        if parameter.grad is not None and _is_image(parameter.grad):
            parameter.grad = _laid_out(parameter.grad, parameter)


def _store(model: "torch.nn.Module", wanted: "torch.memory_format") -> None:
    # Not by `to`: it wants this format of 5-d weights too, and fails halfway through the model.
    model._apply(lambda x: x.to(memory_format=wanted) if x.dim() == 4 else x)  # type: ignore[no-untyped-call]


def follow_weights(optimizer: "torch.optim.Optimizer") -> "torch.optim.Optimizer":
    """Let an optimizer's states are as its weights do, loaded ones too; saved ones are contiguous.

    Fused kernels walk weights and states side by side: of two formats the one on the CPU mixes the
    elements up, the one on CUDA ends the training. A checkpoint may go on where weights are stored
    otherwise.
    """
    lay_out_states(optimizer)
    optimizer.register_load_state_dict_post_hook(lay_out_states)
    optimizer.register_state_dict_post_hook(_contiguous_states)
    return optimizer


def lay_out_states(optimizer: "torch.optim.Optimizer") -> None:
    """Give each state that has the shape of a 4-d weight the strides of that weight."""
    for weight, state in optimizer.state.items():
        for name, value in state.items() if _is_image(weight) else ():
            if _is_image(value) and value.shape == weight.shape:
                state[name] = _laid_out(value, weight)


def _laid_out(value: "torch.Tensor", weight: "torch.Tensor") -> "torch.Tensor":
    import torch

    # Strides, not formats: of one channel or one pixel both formats are the same.
    if value.stride() == weight.stride():
        return value
    return torch.empty_like(weight, dtype=value.dtype, device=value.device).copy_(value)


def _contiguous_states(_optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
    states = {
        key: {name: _contiguous(value) for name, value in state.items()}
        if isinstance(state, dict)
        else state  # an optimizer may keep a value of its own alongside its parameters
        for key, state in saved["state"].items()
    }
    return {**saved, "state": states}


def _contiguous(value: Any) -> Any:
    import torch

    if not _is_image(value) or value.stride() == torch.empty(value.shape, device="meta").stride():
        return value
    return value.clone(memory_format=torch.contiguous_format)


def _is_image(value: Any) -> bool:
    """Return whether a value is a plain 4-d tensor: packed and sharded ones see to their own."""
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.dim() == 4


def with_channels_last_inputs(call: Callable[..., Output]) -> Callable[..., Output]:
    """Return the call with every 4-d tensor among its arguments converted, nested ones too."""

    @functools.wraps(call)
    def call_converted(*args: Any, **kwargs: Any) -> Output:
        converted = [map_leaves(value, _converted) for value in args]
        named = {name: map_leaves(value, _converted) for name, value in kwargs.items()}
        return call(*converted, **named)

    return call_converted


def convolution_weights(model: "torch.nn.Module") -> "list[torch.Tensor]":
    """Return the weights of the model's 2-d convolutions."""
    return [m.weight for m in model.modules() if isinstance(m, _kinds())]


def _kinds() -> "tuple[type[torch.nn.Conv2d], type[torch.nn.ConvTranspose2d]]":
    import torch

    return torch.nn.Conv2d, torch.nn.ConvTranspose2d


def is_channels_last(weight: "torch.Tensor") -> bool:
    """Return whether a 4-d tensor is stored with its channels last."""
    import torch

    return weight.is_contiguous(memory_format=torch.channels_last)


def _converted(leaf: Any) -> Any:
    import torch

    if not isinstance(leaf, torch.Tensor) or leaf.dim() != 4 or leaf.layout != torch.strided:
        return leaf
    return leaf.contiguous(memory_format=torch.channels_last)


KOREAN = """
Store images and convolution weights with the channels last.
    이미지와 합성곱 가중치를 channels-last로 저장합니다.
Once the model is on its device, and for each batch of images:
    모델을 디바이스로 옮긴 뒤, 그리고 이미지 배치마다:
{n} convolutions in the format their kernels prefer
    합성곱 {n}개를 커널이 선호하는 메모리 형식으로 둡니다
{why}; {share} of the kernels' time converts
    {why}. 지금은 커널 시간의 {share}가 형식 변환입니다
{n} of {all} convolutions were given images with the channels first
    합성곱 {all}개 중 {n}개가 channels-first 이미지를 받았습니다
{what}, and convert them each time, among them {name}
    {what}. {name} 등은 매번 변환합니다
nothing to change: the model has no 2-d convolutions
    바꿀 것이 없습니다. 모델에 2차원 합성곱이 없습니다
nothing to change: the model is channels_last already
    바꿀 것이 없습니다. 모델이 이미 channels_last입니다
"""
