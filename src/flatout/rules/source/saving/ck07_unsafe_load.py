"""A checkpoint is loaded so that it may run code."""

from collections.abc import Iterator

from flatout.analysis.source.edits import set_argument, suggested
from flatout.analysis.source.script import Issue, Script, argument, constant


def check(script: Script) -> Iterator[Issue]:
    """Report `torch.load(..., weights_only=False)`."""
    for call in script.calls("torch.load"):
        if constant(argument(call, "weights_only")) is not False:
            continue
        source = argument(call, "f", 0)
        if source is not None and script.called(script.origin(source)) == "io.BytesIO":
            continue  # what the script itself has just written
        yield Issue(
            node=call,
            because="weights_only=False unpickles the file: whoever wrote it can run code here",
            instead="weights_only=True, and torch.serialization.add_safe_globals for other classes",
            fix=suggested(set_argument(script, call, "weights_only", "True")),
        )
