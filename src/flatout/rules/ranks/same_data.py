"""All ranks train on the same samples."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile

TRAINS_WRONG = True
IN_PROJECT = ("DS03",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report ranks under DDP whose first batches have the same samples with the same content."""
    count = len(profile.ranks)
    firsts = {rank.first_batch for rank in profile.ranks}
    # Ranks that split a model, and not the data, are meant to have the same.
    is_ddp = any(model.name == "DistributedDataParallel" for model in profile.models)
    if count < 2 or not is_ddp or len(firsts) != 1 or "" in firsts:
        return None
    return Finding(
        code="same_data",
        share=1 - 1 / count,
        is_bound=True,
        because=words("finding.same_data.because", n=str(count)),
        next=words("finding.same_data.next"),
        evidence={"ranks": float(count)},
        lines=tuple(loader.line for loader in profile.training_loaders if loader.line),
    )
