"""Let cuDNN measure its convolution algorithms and keep the fastest.

What it does: sets `torch.backends.cudnn.benchmark`.
When it helps: convolutions on CUDA with few distinct input shapes.
What it costs: a slower first step for each new shape.
How it is checked: losses and gradients match up to rounding: another algorithm sums otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

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
)

MAX_SHAPES = 4
"""With more input shapes, measuring again for each costs more than it brings: an assumption."""
STARTUP_S = 2.0
"""Trying the algorithms of each convolution once: general knowledge, seconds; not measured."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CudnnAutotune(Technique):
    """Let cuDNN keep the fastest of its convolution algorithms."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    by_hand: ClassVar[str] = """
At the start of the script:
+ torch.backends.cudnn.benchmark = True
"""
    source: ClassVar[SourceForm | None] = SourceForm(start="torch.backends.cudnn.benchmark = True")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["CudnnAutotune"]:
        """Return the technique for convolutional models with few input shapes on NVIDIA."""
        if profile.device_kind != "cuda" or machine.device.kind == "rocm":
            return ()
        is_useful = any(m.conv_weights and m.input_shapes <= MAX_SHAPES for m in profile.models)
        return [cls()] if is_useful else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect forward and backward to shrink by its prior."""
        compute_ms = addressable_ms(profile, ("forward", "backward"), COMPUTE_CAUSES)
        return Effect(
            step_ms=-compute_ms * (1 - 1 / prior_for(self, profile).speedup),
            startup_s=STARTUP_S,
            why="the fastest algorithm for each convolution",
        )

    def model(self, root: Any) -> Any:
        """Switch the measuring on for a convolutional root on a CUDA device."""
        import torch

        kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
        convolution = next((m for m in root.modules() if isinstance(m, kinds)), None)
        if convolution is None:
            raise NotApplicable("the model has no convolutions")
        if not convolution.weight.is_cuda:
            raise NotApplicable("cuDNN is only used on CUDA devices")
        if torch.backends.cudnn.benchmark:
            raise NotApplicable("the script switched it on itself")
        if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            raise NotApplicable("the script asked for deterministic algorithms")
        torch.backends.cudnn.benchmark = True
        return root

    def switch(self, training: RunningTraining) -> Switch:
        """Set torch's switch; what cuDNN has measured it keeps."""
        from torch.backends import cudnn

        self.model(training.roots[0])

        def turn(is_on: bool) -> None:  # noqa: FBT001  called by position
            cudnn.benchmark = is_on

        turn(False)  # noqa: FBT003
        return Switch(turn=turn)


KOREAN = """
Let cuDNN keep the fastest of its convolution algorithms.
    cuDNN이 가장 빠른 합성곱 알고리즘을 골라 쓰게 합니다.
the fastest algorithm for each convolution
    합성곱마다 가장 빠른 알고리즘을 씁니다
the model has no convolutions
    모델에 합성곱이 없습니다
cuDNN is only used on CUDA devices
    cuDNN은 CUDA 디바이스에서만 쓰입니다
the script switched it on itself
    스크립트가 이미 직접 켰습니다
the script asked for deterministic algorithms
    스크립트가 결정적 알고리즘을 요청했습니다
"""
