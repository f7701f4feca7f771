"""Gradients are filled with zeros instead of being let go."""

from collections.abc import Iterator

from flatout.analysis.source.edits import remove_argument, suggested
from flatout.analysis.source.script import Issue, Script, argument, constant

KOREAN = """
gradients are filled with zeros instead of being let go
  그래디언트를 놓아주지 않고 0으로 채웁니다
every gradient is written once more in each step and keeps its memory through the forward pass
  스텝마다 모든 그래디언트를 한 번 더 쓰고, 순전파 동안 그 메모리를 잡고 있습니다
zero_grad(), which lets them go
  그래디언트를 놓아주는 zero_grad()
"""


def check(script: Script) -> Iterator[Issue]:
    """Report `zero_grad(set_to_none=False)`."""
    for call in script.methods("zero_grad"):
        if constant(argument(call, "set_to_none", 0)) is not False:
            continue
        yield Issue(
            node=call,
            because=(
                "every gradient is written once more in each step and keeps its memory through "
                "the forward pass"
            ),
            instead="zero_grad(), which lets them go",
            fix=suggested(remove_argument(script, call, "set_to_none")),
        )
