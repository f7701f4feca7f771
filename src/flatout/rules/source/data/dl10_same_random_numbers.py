"""Every worker draws the same random numbers from a copy of one generator."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, is_self_attribute
from flatout.analysis.source.training import MAP, dataset_classes

GENERATORS = (
    "numpy.random.default_rng",
    "numpy.random.RandomState",
    "numpy.random.Generator",
    "random.Random",
)


def check(script: Script) -> Iterator[Issue]:
    """Report generators that a data set makes once and draws from in `__getitem__`."""
    if "get_worker_info" in script.text or "worker_init_fn" in script.text:
        return
    for owner in dataset_classes(script, MAP):
        getter = script.method(owner, "__getitem__")
        setup = script.method(owner, "__init__")
        if getter is None or setup is None:
            continue
        used = {node.attr for node in ast.walk(getter) if isinstance(node, ast.Attribute)}
        for node in script.within(setup, ast.Assign):
            target = node.targets[0]
            if not is_self_attribute(target) or script.called(node.value) not in GENERATORS:
                continue
            if target.attr in used:  # type: ignore[attr-defined]
                yield Issue(
                    node=node,
                    because=(
                        "each worker gets a copy of this generator in the same state: all draw the "
                        "same numbers, and the same again in the next epoch"
                    ),
                    instead=(
                        "make it in the worker, seeded by torch.utils.data.get_worker_info().seed, "
                        "or draw from torch's generator, which workers have apart"
                    ),
                )
