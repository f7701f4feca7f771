"""The model trains on the CPU because torch cannot use the GPU that is there."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import Text, words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share
from flatout.rules.runtime.unused_gpu import COMPUTE, MIN_COMPUTE_MS, MIN_SHARE


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a model that computes on the CPU for long, with what keeps torch from the GPU."""
    cause = machine.unseen_because
    if profile.device_kind != "cpu" or not cause:
        return None
    share, compute_ms = profile.share(*COMPUTE), sum(profile.phases_ms[name] for name in COMPUTE)
    if share < MIN_SHARE or compute_ms < MIN_COMPUTE_MS:
        return None
    gpus = max(len(machine.facts.get("gpus", ())), machine.facts.get("pci_gpus", 0))
    name, fields = _words_of(cause, machine)
    return Finding(
        code="unseen_gpu",
        share=share,
        is_bound=True,
        because=words(
            f"finding.unseen_gpu.because_{name}",
            compute=format_ms(compute_ms),
            step=format_ms(profile.step_ms.median),
            share=format_share(share),
            gpus=str(gpus),
            **fields,
        ),
        next=words(f"finding.unseen_gpu.next_{name}", **fields),
        evidence={"compute_ms": compute_ms, "gpus": float(gpus)},
    )


def _words_of(cause: str, machine: Machine) -> tuple[str, dict[str, Text]]:
    """Return under which name a cause is explained, and with which facts."""
    facts = machine.facts
    if cause == "build":
        return cause, {"torch": machine.torch_version}
    if cause == "old":
        return cause, {"built": facts["torch_cuda"], "runs": facts["driver_cuda"]}
    if cause in ("hidden", "unnamed"):
        name, value = next(iter(machine.gpu_choice.items()))
        return "hidden", {"variable": name, "value": repr(value)}
    trouble = facts.get("driver_trouble" if cause == "driver" else "torch_trouble")
    return cause, {"why": trouble or words("finding.unseen_gpu.no_reason")}
