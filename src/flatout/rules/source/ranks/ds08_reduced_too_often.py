"""Ranks exchange gradients for batches after which no step follows."""

from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script
from flatout.analysis.source.training import accumulation, step_parts

WRAPPER = "torch.nn.parallel.DistributedDataParallel"
OTHERS = ("no_sync", "require_backward_grad_sync", "set_requires_gradient_sync", "accelerat")


def check(script: Script) -> Iterator[Issue]:
    """Report accumulation under DDP in files without `no_sync`."""
    if not script.calls(WRAPPER) or any(word in script.text for word in OTHERS):
        return
    for part in step_parts(script):
        found = accumulation(script, part)
        backward = part.backwards[0]
        if found is None or len(part.backwards) != 1 or found[0] in script.ancestors(backward):
            continue
        period = script.source(found[2])
        yield Issue(
            node=backward,
            because=(
                f"every backward exchanges all gradients between the ranks; only one of {period} "
                "is followed by a step"
            ),
            instead="with model.no_sync(): around forward and backward of the others",
        )
