"""The model trains on the CPU though there is a GPU that torch can use."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

COMPUTE = ("forward", "backward", "optimizer")
MIN_SHARE = 0.50
"""Where less than half of the step computes, something else is to be looked at first."""
MIN_COMPUTE_MS = 20.0
"""A step that computes less than this is about the start of operators, which a GPU does not make
faster: small models belong on the CPU. Assumed, not measured."""
NAMES = {"rocm": "cuda"}
"""What torch calls a device where it is not its kind."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a model that computes on the CPU for long; what a GPU would take is not known."""
    if profile.device_kind != "cpu" or not machine.devices:
        return None
    share, compute_ms = profile.share(*COMPUTE), sum(profile.phases_ms[name] for name in COMPUTE)
    if share < MIN_SHARE or compute_ms < MIN_COMPUTE_MS:
        return None
    device = machine.devices[0]
    # None where flatout was started, where the GPU was seen: the script has set it.
    barred_by = str(profile.environment.get("gpu_barred_by", ""))
    cause = "fork" if barred_by == "fork" else "variable" if barred_by else "place"
    return Finding(
        code="unused_gpu",
        share=share,
        is_bound=True,
        because=words(
            f"finding.unused_gpu.because_{cause}",
            compute=format_ms(compute_ms),
            step=format_ms(profile.step_ms.median),
            share=format_share(share),
            n=str(profile.step_ms.n),
            device=device.name,
            variable=barred_by,
        ),
        next=words(
            f"finding.unused_gpu.next_{cause}",
            device=NAMES.get(device.kind, device.kind),
            variable=barred_by,
        ),
        evidence={"compute_ms": compute_ms, "step_ms": profile.step_ms.median},
    )
