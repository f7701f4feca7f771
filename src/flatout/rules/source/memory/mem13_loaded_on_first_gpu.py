"""Every rank loads a checkpoint onto the GPU that saved it."""

from collections.abc import Iterator

from flatout.analysis.source.edits import add_argument, suggested
from flatout.analysis.source.script import Issue, Script, argument, has_unpacked


def check(script: Script) -> Iterator[Issue]:
    """Report `torch.load` without `map_location` in scripts of several ranks."""
    loads = script.calls("torch.load")
    if not script.calls("torch.distributed.init_process_group"):
        return
    if any(argument(call, "map_location", 1) is not None for call in loads):
        return  # the script knows: the one without is often that of a single process
    for call in loads:
        if argument(call, "map_location", 1) is not None or has_unpacked(call):
            continue
        yield Issue(
            node=call,
            because=(
                "tensors return to the GPU they were saved from: every rank takes memory on the "
                "first one"
            ),
            instead='map_location="cpu"',
            fix=suggested(add_argument(script, call, 'map_location="cpu"')),
        )
