"""Compute matrix products and convolutions in bf16, keep the weights in fp32.

What it does: runs each training call of the root module under `torch.autocast` with bfloat16, and
casts its outputs back to fp32, so that a loss outside the model sees what it saw before.
When it helps: most of the step is matrix products or convolutions, on a device that multiplies
bf16 in hardware.
What it costs: three decimal digits in the intermediate results; a cast of each weight per call.
How it is checked: losses and gradients stay inside the guard's band for lower precision.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, final

from flatout.agent.nested import map_leaves
from flatout.analysis.regime import COMPUTE_CAUSES, addressable_ms, lowered_ms
from flatout.analysis.stream_changes import is_expensive, is_half
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.memory_stream import Component, Draft, MemoryStream
from flatout.records.profile import ModelFacts, Profile
from flatout.records.technique import (
    Effect,
    MemoryOption,
    Numerics,
    PlannedDevice,
    RunningTraining,
    SourceForm,
    Switch,
    Technique,
    prior_for,
)

if TYPE_CHECKING:
    import torch

Output = TypeVar("Output")

CPU_SLOWDOWN = 2.0
"""Forward and backward on a CPU without bf16 units, where every product is emulated: 1.1 and 1.8
for two small GPTs where oneDNN was told to do with AVX-512, 4.3 and 4.4 with AVX2 (measured on two
busy cores)."""
MIN_CAPABILITY = (8, 0)
"""Compute capability from which NVIDIA devices multiply bf16 in hardware (Ampere)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Autocast(Technique):
    """Run the model's training calls under bf16 autocast."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward", "fp32_on_fast_bf16"})
    numerics: ClassVar[Numerics] = Numerics.PRECISION
    calibrates_guard: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
Around the forward pass, and nothing else:
+ with torch.autocast(device_type=..., dtype=torch.bfloat16):
+     output = model(...)
Take the loss of output.float().
"""
    source: ClassVar[SourceForm | None] = SourceForm(
        around_forward="with torch.autocast($device, dtype=torch.bfloat16):"
    )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["Bf16Autocast"]:
        """Return the technique for a pure fp32 model on a device with fast bf16."""
        if not has_fast_bf16(profile, machine):
            return ()
        return [cls()] if any(is_plain_fp32(model) for model in profile.models) else ()

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what it makes of a traced step."""
        return [
            MemoryOption(
                why="products in bf16: half the bytes of what they make, tensor cores",
                change=half_precision,
                cost=half_cost,
                helps=may_be_half,
            )
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect forward and backward to shrink by the device's prior, if it multiplies bf16."""
        if lacks_bf16(profile, machine):
            return emulated(profile, "bf16", CPU_SLOWDOWN)
        speedup = prior_for(self, profile).speedup
        compute_ms = lowered_ms(profile)
        return Effect(
            step_ms=-compute_ms * (1 - 1 / speedup),
            why=f"forward and backward, {compute_ms:.1f} ms, {speedup:.1f} times faster",
        )

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Put the call under autocast, unless the script chose a precision itself."""
        device_type = check_root(root)
        return autocast_bf16(call, device_type)

    def switch(self, training: RunningTraining) -> Switch:
        """Choose for each call: nothing of autocast outlives it."""
        return Switch(call=self.forward)


def autocast_bf16(call: Callable[..., Output], device_type: str) -> Callable[..., Output]:
    """Return the call under bf16 autocast, its bf16 outputs cast back to fp32.

    Nested lists, tuples, named tuples, mappings and dataclasses in the output keep their types.
    """
    import torch

    return autocast_to(torch.bfloat16, call, device_type)


def autocast_to(
    dtype: "torch.dtype", call: Callable[..., Output], device_type: str
) -> Callable[..., Output]:
    """Return the call under autocast to a dtype, its outputs of that dtype cast back to fp32."""
    import torch

    def to_fp32(leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.utils.rnn.PackedSequence):
            return leaf.float() if leaf.data.dtype == dtype else leaf
        is_lowered = isinstance(leaf, torch.Tensor) and leaf.dtype == dtype
        return leaf.float() if is_lowered else leaf

    @functools.wraps(call)
    def call_lowered(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            output = call(*args, **kwargs)
        return map_leaves(output, to_fp32)

    return call_lowered


def has_fast_bf16(profile: Profile, machine: Machine) -> bool:
    """Return whether the device that trained multiplies bf16 in hardware."""
    if profile.device_kind == "cpu":
        return machine.has_fast_cpu_bf16
    capability = machine.device.compute_capability
    return capability is not None and capability >= MIN_CAPABILITY


def lacks_bf16(profile: Profile, machine: Machine) -> bool:
    """Return whether the device that trained is known to have no bf16 in hardware."""
    is_known = profile.device_kind == "cpu" or machine.device.compute_capability is not None
    return is_known and not has_fast_bf16(profile, machine)


def emulated(profile: Profile, dtype: str, cpu_slowdown: float) -> Effect:
    """Return what a precision does on a device that has no units for it.

    A CPU converts every number, there and back. A GPU multiplies with its fp32 units after the
    cast: nothing is won.
    """
    if profile.device_kind != "cpu":
        return Effect(why=f"this device has no units for {dtype}: nothing gets faster")
    compute_ms = addressable_ms(profile, ("forward", "backward"), COMPUTE_CAUSES)
    return Effect(
        step_ms=compute_ms * (cpu_slowdown - 1),
        why=f"this CPU has no units for {dtype}: the kernels in forward and backward, "
        f"{compute_ms:.1f} ms, {cpu_slowdown:.0f} times slower",
    )


def is_plain_fp32(model: ModelFacts) -> bool:
    """Return whether a model computes in fp32 alone."""
    return model.dtypes == ("float32",) and not model.used_autocast


def check_root(root: "torch.nn.Module") -> str:
    """Return the device type of the root's parameters."""
    import torch

    floating = [p for p in root.parameters() if p.is_floating_point()]
    if not floating:
        raise NotApplicable("the model has no floating-point parameters")
    others = sorted({str(p.dtype) for p in floating if p.dtype != torch.float32})
    if others:
        raise NotApplicable(f"the model has parameters in {', '.join(others)} already")
    device_type = floating[0].device.type
    if torch.is_autocast_enabled(device_type):
        raise NotApplicable("the script runs the model under autocast itself")
    # Accelerate wraps `forward` in its own autocast and keeps the original alongside it.
    if any("_original_forward" in vars(module) for module in root.modules()):
        raise NotApplicable("Accelerate runs the model under autocast itself")
    return device_type


def half_precision(stream: MemoryStream) -> MemoryStream:
    """Autocast: what products make has two bytes instead of four; all else stays as it is."""
    draft = Draft(stream)
    for index, allocation in enumerate(stream.allocations):
        is_made = allocation.component in (Component.ACTIVATIONS, Component.TEMPORARIES)
        if is_made and allocation.dtype == "float32" and is_expensive(allocation):
            draft.resize(index, -(-allocation.size // 2))
    return draft.build()


def half_cost(stream: MemoryStream, device: PlannedDevice) -> float:
    """Return the ratio of the arithmetic in bf16; traffic is left as it is."""
    step = device.step_s(stream)
    saved = stream.model_flops / device.flops_per_s(stream)
    saved -= stream.model_flops / device.half_flops_per_s
    return 1 - saved / step if step else 1.0


def may_be_half(stream: MemoryStream, device: PlannedDevice) -> bool:
    """Return whether the device has bf16 and the step does not compute in half already."""
    capability = device.capability
    return (capability is None or capability >= MIN_CAPABILITY) and not is_half(stream)


KOREAN = """
Run the model's training calls under bf16 autocast.
    모델의 학습 호출을 bf16 autocast로 실행합니다(혼합 정밀도).
Around the forward pass, and nothing else:
    순전파만 감쌉니다:
Take the loss of output.float().
    손실은 output.float()로 계산합니다.
products in bf16: half the bytes of what they make, tensor cores
    행렬 곱을 bf16으로 계산해 결과의 바이트가 절반이 되고 텐서 코어를 씁니다
forward and backward, {ms} ms, {ratio} times faster
    순전파와 역전파 {ms} ms가 {ratio}배 빨라집니다
this device has no units for {dtype}: nothing gets faster
    이 디바이스에는 {dtype} 연산 하드웨어가 없어 빨라지지 않습니다
this CPU has no units for {dtype}: the kernels in forward and backward, {ms} ms, {ratio} times
slower
    이 CPU에는 {dtype} 연산 하드웨어가 없어 순전파와 역전파의 커널 {ms} ms가 {ratio}배 느려집니다
the model has no floating-point parameters
    모델에 부동소수점 파라미터가 없습니다
the model has parameters in {names} already
    모델에 이미 {names} 파라미터가 있습니다
the script runs the model under autocast itself
    스크립트가 모델을 직접 autocast로 실행합니다
Accelerate runs the model under autocast itself
    Accelerate가 모델을 autocast로 실행합니다
"""
