"""One process drives all GPUs through nn.DataParallel."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile

IN_PROJECT = ("DS01",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a model in nn.DataParallel on several GPUs, all but one of which it may cost."""
    count = len(machine.devices)
    if count < 2 or not any(model.name == "DataParallel" for model in profile.models):
        return None
    return Finding(
        code="data_parallel",
        share=1 - 1 / count,
        is_bound=True,
        because=words("finding.data_parallel.because", n=str(count)),
        next=words("finding.data_parallel.next", n=str(count)),
        evidence={"devices": float(count)},
    )
