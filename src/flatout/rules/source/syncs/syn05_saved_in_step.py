"""A checkpoint is written in every step."""

from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script
from flatout.analysis.source.training import runs_every_step, step_parts


def check(script: Script) -> Iterator[Issue]:
    """Report `torch.save` in each step of a loop within a loop."""
    calls = script.calls("torch.save")
    for part in step_parts(script) if calls else ():
        for call in calls:
            # A single loop may be one of epochs, each a step over all data.
            if script.loops(part.node) and runs_every_step(script, call, part):
                yield Issue(
                    node=call,
                    because="every step copies the state to the host and waits for the disk",
                    instead="save every n-th step or once an epoch",
                )
