"""Matrix products in fp32 may not use TF32 on a device that has it."""

from flatout.analysis.regime import COMPUTE_CAUSES, addressable_ms, full_fp32_ms
from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile

MIN_CAPABILITY = (8, 0)
"""Compute capability from which NVIDIA devices have TF32 (Ampere)."""
MIN_SHARE = 0.20
"""Of the step in products, of all that computes where no trace tells; below, other things count."""
MENDED_BY = frozenset({"tf32", "bf16_autocast", "fp16_autocast"})
IN_PROJECT = ("AMP02",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report fp32 models on such a device where products are computed in full fp32."""
    capability = machine.device.compute_capability
    if profile.device_kind != "cuda" or capability is None or capability < MIN_CAPABILITY:
        return None
    names = [m.name for m in profile.models if m.dtypes == ("float32",) and not m.used_autocast]
    measured_ms = full_fp32_ms(profile)
    compute_ms = measured_ms
    if compute_ms is None:
        compute_ms = addressable_ms(profile, ("forward", "backward"), COMPUTE_CAUSES)
    share = compute_ms / profile.step_ms.median if profile.step_ms.median else 0.0
    if not names or share < MIN_SHARE or profile.environment.get("fp32_matmul") != "highest":
        return None
    return Finding(
        code="tf32_off",
        share=min(1.0, share),
        is_bound=measured_ms is None,
        because=words("finding.tf32_off.because", names=tuple(names), device=profile.device_name),
        next=words("finding.tf32_off.next", command="flatout tune --only tf32 train.py"),
        evidence={"compute_ms": compute_ms},
    )
