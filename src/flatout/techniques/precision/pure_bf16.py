"""Keep the weights in bf16 and round them stochastically after each update.

What it does: converts the model's parameters to bf16. Each optimizer step runs on fp32 copies with
fp32 states, and the result is rounded up or down at random, in proportion to the distance.
When it helps: weights and gradients are much of the memory, or their casts much of the step.
What it costs: small updates are right on average only; temporary fp32 copies inside a step.
How it is checked: it changes the training on purpose, so losses are looked at for damage only.
"""

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent.nested import map_leaves
from flatout.analysis.regime import lowered_ms
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique, prior_for, process_state
from flatout.techniques.memory.chunked_cross_entropy import logits_bytes, memory_bytes_per_s
from flatout.techniques.memory_pressure import activation_bytes, kept_bytes, parameter_bytes
from flatout.techniques.precision.bf16_autocast import (
    CPU_SLOWDOWN,
    Bf16Autocast,
    check_root,
    emulated,
    has_fast_bf16,
    is_plain_fp32,
    lacks_bf16,
)

if TYPE_CHECKING:
    import torch

STEP_BYTES = 80
"""Memory that a step in fp32 crosses for each parameter, alongside the optimizer's own: copies of
weights and gradients to fp32, noise, sum and mask, what is infinite, and the way back. Counted; a
small language model took 6 ns for each, 13e9 B/s on two cores (the record of levers_text)."""
LOW_BITS = 16
"""Bits of an fp32 number that bf16 does not have."""


@dataclass(slots=True)
class Lowered:
    """What was converted in one process."""

    parameters: "dict[int, weakref.ref[torch.Tensor]]" = field(default_factory=dict)
    """By identity, as long as the script keeps them: it may train one model after the other."""
    closures: list[str] = field(default_factory=list)
    """Names of optimizers that were stepped with a closure."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Brings the models back to fp32."""

    def add(self, parameters: "Iterable[torch.Tensor]") -> "Lowered":
        """Note parameters that were converted."""
        for parameter in parameters:
            gone = functools.partial(_forget, self.parameters, id(parameter))
            self.parameters[id(parameter)] = weakref.ref(parameter, gone)
        return self

    def take_back(self) -> None:
        """Let the models train in fp32 again."""
        while self.undo:
            self.undo.pop()()
        self.parameters.clear()


def _forget(parameters: dict[int, Any], number: int, _gone: Any) -> None:
    parameters.pop(number, None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PureBf16(Technique):
    """Keep the weights in bf16, rounded stochastically."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    moves_random_stream: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
The model, and an optimizer that rounds stochastically:
+ model = model.bfloat16()
+ optimizer = torchao.optim._AdamW(model.parameters(), bf16_stochastic_round=True)
"""

    asked: list[str] = process_state(list)
    """Names of the models that were to be converted, those that could not be too."""
    lowered: "Lowered" = process_state(Lowered)

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["PureBf16"]:
        """Return the technique for a pure fp32 model on a device with fast bf16."""
        if not has_fast_bf16(profile, machine):
            return ()
        return [cls()] if any(is_plain_fp32(model) for model in profile.models) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect kernels as fast as under autocast, and a dearer step of the optimizer.

        Half of the weights goes while the activations are there, before there are gradients; in the
        step all are whole again, so no more goes than the activations take.
        """
        parameters = sum(model.parameters for model in profile.models)
        rounding_ms = 1e3 * STEP_BYTES * parameters / memory_bytes_per_s(profile, machine)
        if lacks_bf16(profile, machine):
            slower = emulated(profile, "bf16", CPU_SLOWDOWN)
            return replace(slower, step_ms=slower.step_ms + rounding_ms)
        speedup = prior_for(Bf16Autocast, profile).speedup
        compute_ms = lowered_ms(profile)
        logits = logits_bytes(profile)
        saved = min(parameter_bytes(profile) // 2, activation_bytes(profile))
        return Effect(
            step_ms=rounding_ms - compute_ms * (1 - 1 / speedup),
            peak_bytes=kept_bytes(profile, logits, logits // 2) - saved,
            why=f"kernels in forward and backward, {compute_ms:.1f} ms, {speedup:.1f} times "
            f"faster; {rounding_ms:.1f} ms for fp32 copies and rounding in the step",
        )

    def model(self, root: Any) -> Any:
        """Convert the parameters of the root in place."""
        from flatout.agent import optimizer_swap

        self.asked.append(type(root).__name__)
        if self.lowered.closures:  # the model may be called in a step's closure first
            raise NotApplicable(IN_CLOSURE)
        check_root(root)
        parameters = list(root.parameters())
        if any(hasattr(p, "to_local") for p in parameters):
            raise NotApplicable("sharded parameters keep their own precision")
        # Now, not in the first step: no optimizer may refuse what is converted.
        optimizer_swap.need_of(parameters, "pure_bf16, which makes each step in fp32,")
        self.lowered.add(to_bf16(root))
        take_back = functools.partial(_take_back, weakref.ref(root), _add_casts(root))
        self.lowered.undo.append(take_back)
        return root

    def optimizer(self, optimizer: Any) -> Any:
        """Let its steps run in fp32, with what it holds of the model now and later on."""
        steps = _Fp32Steps(optimizer, self.lowered)
        # A script may step once before its model is called, which silences schedulers.
        if self.asked and not steps.find_held(optimizer):
            raise NotApplicable("it holds no parameter of the converted model")
        return optimizer

    def end(self) -> str:
        """Say where steps could not be made in fp32."""
        if self.lowered.closures:
            raise NotApplicable(IN_CLOSURE)
        if not self.lowered.undo:
            raise NotApplicable("no training call of a model was seen")
        return ""


IN_CLOSURE = "its steps take a closure, which computes gradients inside of them"


def to_bf16(model: "torch.nn.Module") -> "list[torch.Tensor]":
    """Convert a model's fp32 parameters and buffers to bf16 in place; return the parameters.

    Batch normalisation stays in fp32: the small updates of its statistics would vanish. So do
    frequencies that positions are multiplied by: what rounding takes of them grows with the length.
    """
    import torch
    from torch.nn.modules.batchnorm import _NormBase

    converted: list[torch.Tensor] = []
    lowered = [m for m in model.modules() if not isinstance(m, _NormBase)]
    for parameter in {p: None for m in lowered for p in m.parameters(recurse=False)}:
        if parameter.dtype == torch.float32:
            parameter.data, parameter.grad = parameter.data.bfloat16(), None
            converted.append(parameter)
    for module in lowered:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == torch.float32 and not _counts_positions(module, name, buffer):
                buffer.data = buffer.data.bfloat16()
    return converted


def _counts_positions(module: "torch.nn.Module", name: str, buffer: "torch.Tensor") -> bool:
    """Return whether a buffer seems to hold frequencies, and bf16 cannot say them.

    They are computed again in each process and not saved, or are called so. Of a frequency near
    0.87 bf16 loses up to 0.2 %: at position 4096 that is an angle of several radians. Finished
    tables of sines are rounded as any activation is.
    """
    is_row = buffer.dim() <= 1
    is_remade = name in module._non_persistent_buffers_set
    is_exact = bool((buffer.bfloat16().float() == buffer).all())
    return is_row and (is_remade or "freq" in name.lower()) and not is_exact


def cast_calls(model: "torch.nn.Module") -> "torch.nn.Module":
    """Cast the fp32 inputs of a model's calls to bf16, and its bf16 outputs to fp32.

    By hooks, so that evaluations and copies of the model get them too; and for its parts where the
    script calls one itself, such as a VAE's decoder to sample.
    """
    _add_casts(model)
    return model


def _add_casts(model: "torch.nn.Module") -> list[Any]:
    """Add those hooks; return their handles."""
    inside: list[bool] = []
    """Holds something while the model is called: its parts hand on what they are given then."""
    handles: list[Any] = []
    for name, module in model.named_modules():
        if name.count(".") <= 1:  # children, and what is in their lists
            about = inside, module is not model
            lower = functools.partial(_lower, *about)
            handles.append(module.register_forward_pre_hook(lower, with_kwargs=True))
            handles.append(module.register_forward_hook(functools.partial(_restore, *about)))
    return handles


def _take_back(model: "weakref.ref[torch.nn.Module]", casts: Iterable[Any]) -> None:
    """Let a model train in fp32 again, from the weights that it has now."""
    import torch

    for cast in casts:
        cast.remove()
    found = model()
    if found is not None:
        _raise([p for p in found.parameters() if p.dtype == torch.bfloat16])
        for buffer in found.buffers():
            if buffer.dtype == torch.bfloat16:
                buffer.data = buffer.data.float()


def _lower(inside: list[bool], is_part: bool, _: Any, args: Any, kwargs: Any) -> Any:  # noqa: FBT001
    import torch

    if is_part and inside:
        return None
    if not is_part:
        inside.append(True)

    def lowered(leaf: Any) -> Any:
        is_fp32 = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
        return leaf.bfloat16() if is_fp32 else leaf

    named = {name: map_leaves(value, lowered) for name, value in kwargs.items()}
    return tuple(map_leaves(value, lowered) for value in args), named


def _restore(inside: list[bool], is_part: bool, _: Any, _args: Any, output: Any) -> Any:  # noqa: FBT001
    import torch

    if is_part and inside:
        return output
    inside.clear()

    def restored(leaf: Any) -> Any:
        is_bf16 = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16
        return leaf.float() if is_bf16 else leaf

    return map_leaves(output, restored)


def step_in_fp32(
    optimizer: "torch.optim.Optimizer", parameters: "Sequence[torch.Tensor]"
) -> "torch.optim.Optimizer":
    """Let an optimizer step on fp32 copies of bf16 parameters, which are then rounded back.

    Its states are made in fp32 in the first step, or were loaded. A step with a closure stays in
    bf16: its gradients are made inside of it.
    """
    _Fp32Steps(optimizer, Lowered().add(parameters))
    return optimizer


class _Fp32Steps:
    """Lets an optimizer step on fp32 copies of those of its parameters that were converted."""

    def __init__(self, optimizer: "torch.optim.Optimizer", lowered: Lowered) -> None:
        self.lowered = lowered
        self.held: dict[int, torch.Tensor] = {}
        self.rounding: Any = None
        _raise_states(optimizer, self.find_held(optimizer))
        optimizer.register_step_pre_hook(self.before)
        load = optimizer.load_state_dict

        def load_in_fp32(this: Any, state: Any) -> None:
            # Torch casts loaded states to the parameter's dtype: let that be fp32.
            _raise(self.find_held(this))
            load(state)
            _round(self.find_held(this))

        loading: Any = optimizer
        loading.load_state_dict = types.MethodType(load_in_fp32, optimizer)

    def find_held(self, optimizer: Any) -> "list[torch.Tensor]":
        """Return its converted parameters; groups may have joined since it was asked last."""
        # Never fewer: other techniques take some out of the groups for the length of a step.
        for group in optimizer.param_groups:
            self.held.update({id(p): p for p in group["params"]})
        return [p for number, p in self.held.items() if number in self.lowered.parameters]

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Raise weights and gradients for the length of a step."""
        if any(callable(value) for value in (*args, *kwargs.values())):
            self.lowered.closures.append(type(optimizer).__name__)
            self.lowered.take_back()
            return
        # Not earlier: it is to come after what other techniques do at the end of a step.
        if self.rounding is None:
            self.rounding = optimizer.register_step_post_hook(self.after)
        _raise(self.find_held(optimizer))

    def after(self, optimizer: Any, *_: Any) -> None:
        """Round the weights back."""
        _round(self.find_held(optimizer))


def round_stochastically(value: "torch.Tensor") -> "torch.Tensor":
    """Return an fp32 tensor in bf16, rounded up with the probability of its distance from below."""
    import torch

    bits = value.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << LOW_BITS, bits.shape, dtype=torch.int32, device=value.device)
    raised = (bits + noise) & -(1 << LOW_BITS)
    # Alongside the largest number the sum would become an infinity, and of a NaN anything.
    kept = torch.where(value.isfinite() & (value.abs() < LARGEST), raised, bits)
    return kept.view(torch.float32).bfloat16()


LARGEST = 3.3e38
"""Numbers above it are rounded to the nearest: bf16 ends at 3.39e38."""


def _raise(parameters: "Sequence[torch.Tensor]") -> None:
    for parameter in parameters:
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.float()
        parameter.grad = None if gradient is None else gradient.float()


def _raise_states(optimizer: "torch.optim.Optimizer", parameters: "Sequence[torch.Tensor]") -> None:
    """Let states be fp32 that were loaded when their parameters were bf16 already."""
    import torch

    for state in (optimizer.state.get(parameter, {}) for parameter in parameters):
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
                state[name] = value.float()


def _round(parameters: "Sequence[torch.Tensor]") -> None:
    import torch

    for parameter in parameters:
        if parameter.data.dtype == torch.bfloat16:
            continue
        gradient, parameter.grad = parameter.grad, None
        parameter.data = round_stochastically(parameter.data)
        parameter.grad = None if gradient is None else gradient.bfloat16()


KOREAN = """
Keep the weights in bf16, rounded stochastically.
    가중치를 bf16으로 두고 확률적으로 반올림합니다.
The model, and an optimizer that rounds stochastically:
    모델, 그리고 확률적으로 반올림하는 옵티마이저:
kernels in forward and backward, {ms} ms, {ratio} times faster; {rounding} ms for fp32 copies and
rounding in the step
    순전파와 역전파의 커널 {ms} ms가 {ratio}배 빨라지고, 스텝의 fp32 사본과 반올림에 {rounding} ms가
    듭니다
sharded parameters keep their own precision
    샤딩된 파라미터는 정밀도를 바꿀 수 없습니다
pure_bf16, which makes each step in fp32,
    스텝을 fp32로 하는 pure_bf16
it holds no parameter of the converted model
    변환한 모델의 파라미터가 이 옵티마이저에 없습니다
its steps take a closure, which computes gradients inside of them
    step이 클로저를 받아 그 안에서 그래디언트를 계산합니다
"""
