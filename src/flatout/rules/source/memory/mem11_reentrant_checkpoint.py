"""Activation checkpointing in its old form, which drops gradients."""

from collections.abc import Iterator

from flatout.analysis.source.edits import set_argument, suggested
from flatout.analysis.source.script import Issue, Script, argument, constant

CHECKPOINTS = (
    "torch.utils.checkpoint.checkpoint",
    "torch.utils.checkpoint.checkpoint_sequential",
)


def check(script: Script) -> Iterator[Issue]:
    """Report checkpoints without `use_reentrant=False`."""
    for call in script.calls(*CHECKPOINTS):
        chosen = argument(call, "use_reentrant")
        is_open = any(keyword.arg is None for keyword in call.keywords)
        if is_open or (chosen is not None and constant(chosen) is not True):
            continue
        yield Issue(
            node=call,
            because=(
                "the reentrant form gives no gradients where no input requires one, and ignores "
                "keyword arguments and hooks"
            ),
            instead="use_reentrant=False",
            fix=suggested(set_argument(script, call, "use_reentrant", "False")),
        )
