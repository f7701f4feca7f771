"""Let tensor cores round fp32 matrix products to TF32.

What it does: allows TF32 for fp32 matrix products on CUDA devices.
When it helps: the model computes in fp32 on an Ampere or newer GPU. On top of bf16 it does nothing.
What it costs: 10 instead of 23 bits of mantissa in the products.
How it is checked: losses and gradients stay inside the guard's band for lower precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.agent.tf32 import MIN_CAPABILITY, allows
from flatout.analysis.regime import COMPUTE_CAUSES, addressable_ms, full_fp32_ms
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tf32(Technique):
    """Allow TF32 in fp32 matrix products."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.PRECISION
    by_hand: ClassVar[str] = """
At the start of the script:
+ torch.set_float32_matmul_precision("high")
"""
    source: ClassVar[SourceForm | None] = SourceForm(
        start='torch.set_float32_matmul_precision("high")'
    )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["Tf32"]:
        """Return the technique for fp32 models on an Ampere or newer device."""
        if not has_tf32(profile, machine):
            return ()
        is_fp32 = any("float32" in m.dtypes and not m.used_autocast for m in profile.models)
        return [cls()] if is_fp32 else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect forward and backward to shrink by its prior, where there is TF32."""
        if not has_tf32(profile, machine):
            return Effect(why="this device has no TF32: nothing gets faster")
        products_ms = full_fp32_ms(profile)
        if products_ms is None:
            products_ms = addressable_ms(profile, ("forward", "backward"), COMPUTE_CAUSES)
        return Effect(
            step_ms=-products_ms * (1 - 1 / prior_for(self, profile).speedup),
            why=f"fp32 products in {products_ms:.1f} ms of forward and backward",
        )

    def model(self, root: Any) -> Any:
        """Switch TF32 on once a root in fp32 is seen on a device that has it."""
        import torch

        parameter = next((p for p in root.parameters() if p.dtype == torch.float32), None)
        if parameter is None:
            raise NotApplicable("the model has no fp32 parameters")
        if not parameter.is_cuda:
            raise NotApplicable(f"TF32 needs a CUDA device; the model is on {parameter.device}")
        if torch.cuda.get_device_capability(parameter.device) < MIN_CAPABILITY:
            raise NotApplicable("this device has no TF32")
        if torch.is_autocast_enabled("cuda"):
            raise NotApplicable("the model runs under autocast: no fp32 products are left")
        if allows("cuda", "matmul"):
            raise NotApplicable("the script allowed TF32 itself")
        allow_tf32()
        return root

    def switch(self, training: RunningTraining) -> Switch:
        """Set torch's switch, and put it back as it was."""
        import torch

        before = getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")
        self.model(training.roots[0])
        forbid_tf32(before)
        return Switch(turn=lambda is_on: allow_tf32() if is_on else forbid_tf32(before))


def has_tf32(profile: Profile, machine: Machine) -> bool:
    """Return whether the device that trained rounds fp32 products to TF32 when it may."""
    capability = machine.device.compute_capability
    return profile.device_kind == "cuda" and capability is not None and capability >= MIN_CAPABILITY


def allow_tf32() -> None:
    """Allow TF32 in CUDA matrix products, in the family of switches that the process speaks.

    Torch has an older and a newer family, and reading the older one raises once the newer was set
    to something the older cannot say. So the older one is used as long as it can be read: torch's
    compiler reads it too.
    """
    import torch

    if _speaks_newer_family():
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high")


def forbid_tf32(precision: str = "ieee") -> None:
    """Have CUDA matrix products of fp32 computed in fp32, by the same switch as `allow_tf32`.

    Args:
        precision: What torch's newer switch says of that. "none", as at the start, and "ieee" are
            the same to the device, and not to the compiler, whose cache asks for it: on an H200
            what a screen had compiled of a GPT-2 was compiled again, for 26 s.
    """
    import torch

    if not _speaks_newer_family():
        torch.set_float32_matmul_precision("highest")
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        torch.backends.cuda.matmul.fp32_precision = precision


def _speaks_newer_family() -> bool:
    import torch

    try:
        torch.get_float32_matmul_precision()
        _ = torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        return True
    return False


KOREAN = """
Allow TF32 in fp32 matrix products.
    fp32 행렬 곱에 TF32를 허용합니다.
this device has no TF32: nothing gets faster
    이 디바이스에는 TF32가 없어 빨라지지 않습니다
fp32 products in {ms} ms of forward and backward
    순전파와 역전파 {ms} ms 가운데 fp32 행렬 곱에 작용합니다
the model has no fp32 parameters
    모델에 fp32 파라미터가 없습니다
TF32 needs a CUDA device; the model is on {device}
    TF32에는 CUDA 디바이스가 필요한데 모델은 {device}에 있습니다
this device has no TF32
    이 디바이스에는 TF32가 없습니다
the model runs under autocast: no fp32 products are left
    모델이 autocast로 실행되어 fp32 행렬 곱이 남아 있지 않습니다
the script allowed TF32 itself
    스크립트가 TF32를 직접 허용했습니다
"""
