"""cuDNN is asked to be fast and deterministic at once."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, constant

FLAGS = ("torch.backends.cudnn.benchmark", "torch.backends.cudnn.deterministic")


def check(script: Script) -> Iterator[Issue]:
    """Report `benchmark = True` next to `deterministic = True` in one block."""
    set_true: dict[str, ast.Assign] = {}
    for node in script.nodes(ast.Assign):
        name = script.qualified(node.targets[0])
        if name in FLAGS and constant(node.value) is True:
            set_true[name] = node
    if len(set_true) < 2:
        return
    benchmark, deterministic = (set_true[name] for name in FLAGS)
    if script.block(benchmark) is not script.block(deterministic):
        return
    yield Issue(
        node=benchmark,
        because=(
            f"benchmark picks the fastest algorithm in each run again, so line "
            f"{deterministic.lineno} slows the training down without making it repeatable"
        ),
        instead="benchmark = False where runs have to repeat, deterministic = False otherwise",
    )
