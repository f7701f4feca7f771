"""The model trains on the CPU because torch cannot use the GPU that is there."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import Text, words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share
from flatout.rules.runtime.unused_gpu import COMPUTE, MIN_COMPUTE_MS, MIN_SHARE

HIDES_ALL = ("", "-1")


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a model that computes on the CPU for long, with what keeps torch from the GPU."""
    facts = machine.facts
    gpus = max(len(facts.get("gpus", ())), facts.get("pci_gpus", 0))
    if profile.device_kind != "cpu" or machine.devices or not gpus:
        return None
    share, compute_ms = profile.share(*COMPUTE), sum(profile.phases_ms[name] for name in COMPUTE)
    if share < MIN_SHARE or compute_ms < MIN_COMPUTE_MS:
        return None
    cause, fields = _cause(machine)
    return Finding(
        code="unseen_gpu",
        share=share,
        is_bound=True,
        because=words(
            f"finding.unseen_gpu.because_{cause}",
            compute=format_ms(compute_ms),
            step=format_ms(profile.step_ms.median),
            share=format_share(share),
            gpus=str(gpus),
            **fields,
        ),
        next=words(f"finding.unseen_gpu.next_{cause}", **fields),
        evidence={"compute_ms": compute_ms, "gpus": float(gpus)},
    )


def _cause(machine: Machine) -> tuple[str, dict[str, Text]]:
    """Return the first cause, from the outside in: no driver, hidden, not built for, too old."""
    facts = machine.facts
    if not facts.get("gpus"):
        return "driver", {"why": facts.get("driver_trouble") or "-"}
    chosen = {k: v for k, v in facts.get("variables", {}).items() if k.endswith("VISIBLE_DEVICES")}
    hiding = {name: value for name, value in chosen.items() if value in HIDES_ALL}
    built, runs = facts.get("torch_cuda"), facts.get("driver_cuda")
    if not hiding and not built and not facts.get("torch_hip"):
        return "build", {"torch": machine.torch_version}
    if not hiding and built and runs and int(runs.split(".")[0]) < int(built.split(".")[0]):
        return "old", {"built": built, "runs": runs}
    for name, value in (hiding or chosen).items():
        return "hidden", {"variable": name, "value": repr(value)}
    return "trouble", {"why": facts.get("torch_trouble") or "-"}
