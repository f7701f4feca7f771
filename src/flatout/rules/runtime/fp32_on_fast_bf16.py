"""The model computes in fp32 on a device that multiplies bf16 in hardware."""

from flatout.analysis.regime import lowered_ms, products_are_known
from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_COMPUTE_SHARE = 0.20
"""Below a fifth of the step in forward and backward, halving them would bring less than a tenth."""
LOST_SHARE = 0.5
"""Part of forward and backward that bf16 saves: half, as measured on a CPU with AMX (1.7-2.3 times
faster); published GPU numbers are 1.6-2.6 times."""
UNDER_PEAK = 50
"""Products of so small matrices that they reach a fiftieth of the peak rate are not what bf16 makes
faster: where even at that rate they are no visible part of the step, it is about something else."""
LEAST_COMPUTE_MS = {"cpu": 10.0}
"""Forward and backward of one call that take less are about the start of operators, and the casts
add some more: an MLP of 1.2 ms a step ran at 0.81x (measured on a CPU)."""
LEAST_ON_DEVICE_MS = 2.0
"""The same for a device that computes faster; assumed."""
LARGE_PART = 0.20
"""Part of forward and backward that the products take at the peak rate already: then they are what
a step is about, however short it is."""
MENDED_BY = frozenset({"bf16_autocast", "fp16_autocast", "fp8_training", "pure_bf16"})
MIN_CAPABILITY = (8, 0)
"""Compute capability from which NVIDIA devices multiply bf16 in hardware (Ampere)."""
IN_PROJECT = ("AMP01",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report fp32 where most of the step computes and the device has fast bf16."""
    compute_ms = lowered_ms(profile)
    compute_share = compute_ms / profile.step_ms.median if profile.step_ms.median else 0.0
    if compute_share < MIN_COMPUTE_SHARE or not has_fast_bf16(profile, machine):
        return None
    names = [m.name for m in profile.models if m.dtypes == ("float32",) and not m.used_autocast]
    if not names or not _is_about_products(profile, compute_ms):
        return None
    device = machine.cpu_name if profile.device_kind == "cpu" else profile.device_name
    return Finding(
        code="fp32_on_fast_bf16",
        share=LOST_SHARE * compute_share,
        because=words(
            "finding.fp32_on_fast_bf16.because",
            names=tuple(names),
            compute=format_ms(compute_ms),
            step=format_ms(profile.step_ms.median),
            share=format_share(compute_share),
            n=str(profile.step_ms.n),
            device=device or words("finding.fp32_on_fast_bf16.this_device"),
        ),
        next=words(
            "finding.fp32_on_fast_bf16.next",
            command="flatout tune --only bf16_autocast train.py",
        ),
        evidence={"compute_ms": compute_ms, "step_ms": profile.step_ms.median},
        is_bound=not products_are_known(profile),
    )


def _is_about_products(profile: Profile, compute_ms: float) -> bool:
    """Return whether matrix products may be a visible part of the step, as far as is known."""
    least_ms = profile.limits.least_step_ms if profile.limits else None
    calls = max(1.0, profile.batches_per_step)
    is_short = compute_ms / calls < LEAST_COMPUTE_MS.get(profile.device_kind, LEAST_ON_DEVICE_MS)
    if is_short and (least_ms or 0.0) < LARGE_PART * compute_ms:
        return False
    if least_ms is None:
        return True
    return UNDER_PEAK * least_ms >= MIN_COMPUTE_SHARE * profile.step_ms.median


def has_fast_bf16(profile: Profile, machine: Machine) -> bool:
    """Return whether the device that trained multiplies bf16 in hardware."""
    if profile.device_kind == "cpu":
        return machine.has_fast_cpu_bf16
    capability = machine.device.compute_capability
    return capability is not None and capability >= MIN_CAPABILITY
