"""Compute matrix products and convolutions in fp16 with scaled losses, keep the weights in fp32.

What it does: runs each training call of the root module under `torch.autocast` with float16, casts
its outputs back to fp32, and scales every loss so that small gradients do not vanish. Gradients
are unscaled before the script sees them; a step whose gradients overflowed changes nothing.
When it helps: NVIDIA devices that multiply fp16 in hardware and bf16 not: Volta and Turing.
What it costs: a pass over the gradients, one read of a flag per step, a skipped step now and then.
How it is checked: losses and gradients stay inside the guard's band for lower precision.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, final

from flatout.analysis.regime import lowered_ms
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique, prior_for, process_state
from flatout.techniques.precision.bf16_autocast import (
    autocast_to,
    check_root,
    emulated,
    is_plain_fp32,
)
from flatout.techniques.precision.fp16_autocast.loss_scaling import DEFAULT_SCALE, LossScaling

Output = TypeVar("Output")

CPU_SLOWDOWN = 17.0
"""Kernels of forward and backward on a CPU without fp16 units: 128 ms became 2.2 s for a small
language model on two cores (the record of levers_text)."""
FIRST_CAPABILITY, BF16_CAPABILITY = (7, 0), (8, 0)
"""Compute capabilities from which NVIDIA devices multiply fp16, and bf16, in hardware."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Autocast(Technique):
    """Run the model's training calls under fp16 autocast with scaled losses."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.PRECISION
    by_hand: ClassVar[str] = """
Before the loop, and in each step:
+ scaler = torch.amp.GradScaler(...)
+ with torch.autocast(device_type=..., dtype=torch.float16):
+     output = model(...)
+ scaler.scale(loss).backward()
+ scaler.unscale_(optimizer)
Clip the gradients here, then:
+ scaler.step(optimizer)
+ scaler.update()
Step the scheduler only where the scale did not fall.
"""

    initial_scale: int = DEFAULT_SCALE
    """Factor of the first losses, a power of two; it adapts."""
    lowered: list[Any] = process_state(list)
    """Weak references to the roots between their first call and the backward after it."""
    scalings: "list[LossScaling]" = process_state(list)

    def __post_init__(self) -> None:
        if self.initial_scale < 1 or self.initial_scale & (self.initial_scale - 1):
            raise ValueError(f"initial_scale={self.initial_scale} is no power of two; try 8192")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["Fp16Autocast"]:
        """Return the technique for an fp32 model on a device with fast fp16 and no fast bf16."""
        capability = machine.device.compute_capability
        if profile.device_kind != "cuda" or capability is None:
            return ()
        if not FIRST_CAPABILITY <= capability < BF16_CAPABILITY:
            return ()
        return [cls()] if any(is_plain_fp32(model) for model in profile.models) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the kernels to shrink by its prior, if the device multiplies fp16."""
        if lacks_fp16(profile, machine):
            return emulated(profile, "fp16", CPU_SLOWDOWN)
        compute_ms = lowered_ms(profile)
        speedup = prior_for(self, profile).speedup
        return Effect(
            step_ms=-compute_ms * (1 - 1 / speedup),
            why=f"kernels in forward and backward, {compute_ms:.1f} ms, {speedup:.1f} times faster",
        )

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Put the call under autocast, unless the script chose a precision itself."""
        device_type = check_root(root)
        if any(hasattr(p, "to_local") for p in root.parameters()):
            raise NotApplicable("sharded parameters: each rank would skip steps on its own")
        if any(p._backward_hooks for p in root.parameters()):
            raise NotApplicable("the script's hooks on gradients would be given scaled ones")
        self.lowered.append(weakref.ref(root))
        lowered = autocast_fp16(call, device_type)

        @functools.wraps(call)
        def call_lowered(*args: Any, **kwargs: Any) -> Any:
            is_given_up = any(scaling.is_given_up for scaling in self.scalings)
            return (call if is_given_up else lowered)(*args, **kwargs)

        return call_lowered

    def backward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Scale the losses of the models whose calls were lowered."""
        from flatout.agent import optimizer_swap

        if not self.lowered:
            raise NotApplicable("no model was put under fp16 autocast before the first backward")
        optimizer_swap.need_all("fp16_autocast, which skips steps whose gradients overflowed,")
        roots = [root for reference in self.lowered if (root := reference()) is not None]
        self.lowered.clear()
        self.scalings.append(LossScaling(self.initial_scale, self.lowered))
        return self.scalings[-1].install(call, roots)

    def end(self) -> str:
        """Return how many steps changed nothing."""
        skipped = sum(scaling.skipped for scaling in self.scalings)
        if any(scaling.is_given_up for scaling in self.scalings):
            raise NotApplicable(
                f"gradients overflow in fp16 unscaled too: it was given up after {skipped} steps "
                "that changed nothing"
            )
        return f"gradients overflowed in {skipped} steps, which changed nothing" if skipped else ""


def lacks_fp16(profile: Profile, machine: Machine) -> bool:
    """Return whether the device that trained is known to have no fp16 in hardware."""
    if profile.device_kind == "cpu":
        return not machine.has_fast_cpu_fp16
    capability = machine.device.compute_capability
    return capability is not None and capability < FIRST_CAPABILITY


def autocast_fp16(call: Callable[..., Output], device_type: str) -> Callable[..., Output]:
    """Return the call under fp16 autocast, its fp16 outputs cast back to fp32."""
    import torch

    return autocast_to(torch.float16, call, device_type)


KOREAN = """
Run the model's training calls under fp16 autocast with scaled losses.
    모델의 학습 호출을 손실 스케일링과 함께 fp16 autocast로 실행합니다.
Before the loop, and in each step:
    루프 앞에서, 그리고 스텝마다:
Clip the gradients here, then:
    그래디언트 클리핑은 여기서 하고, 그다음:
Step the scheduler only where the scale did not fall.
    스케일이 줄지 않은 스텝에서만 스케줄러를 진행합니다.
no model was put under fp16 autocast before the first backward
    첫 backward 전에 fp16 autocast로 실행된 모델이 없습니다
fp16_autocast, which skips steps whose gradients overflowed,
    그래디언트가 오버플로한 스텝을 건너뛰는 fp16_autocast
sharded parameters: each rank would skip steps on its own
    파라미터가 샤딩되어 있어 랭크마다 따로 스텝을 건너뛰게 됩니다
gradients overflow in fp16 unscaled too: it was given up after {n} steps that changed nothing
    그래디언트가 스케일 없이도 fp16에서 오버플로해, 아무것도 바꾸지 못한 {n}스텝 뒤에 fp32로
    돌아갔습니다
gradients overflowed in {n} steps, which changed nothing
    {n}스텝에서 그래디언트가 오버플로해 그 스텝들은 아무것도 바꾸지 않았습니다
the script's hooks on gradients would be given scaled ones
    스크립트가 그래디언트에 건 훅이 스케일된 그래디언트를 받게 됩니다
initial_scale={scale} is no power of two; try 8192
    initial_scale={scale}은(는) 2의 거듭제곱이 아닙니다. 8192를 써 보세요
"""
