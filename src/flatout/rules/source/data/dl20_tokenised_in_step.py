"""Texts are tokenised in the training loop, between two steps."""

import ast
from collections.abc import Iterator
from typing import Any

from flatout.analysis.source.script import Issue, Script, last_name, names_in, root_name
from flatout.analysis.source.training import StepPart, runs_every_step, step_parts

METHODS = frozenset({"encode", "encode_plus", "encode_batch", "batch_encode_plus", "tokenize"})
"""Of a tokenizer; what its other methods do, decoding above all, is asked for by a step."""


def check(script: Script) -> Iterator[Issue]:
    """Report a tokenizer that is called in each step on what the loader gave."""
    for part in step_parts(script):
        drawn = _drawn(script, part)
        for call in script.within(part.node, ast.Call):
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            is_drawn = any(drawn & names_in(value) for value in given)
            if is_drawn and _tokenises(script, call) and runs_every_step(script, call, part):
                yield Issue(
                    node=call,
                    because="texts are tokenised in the loop: the training waits for it in every "
                    "step, and workers cannot help",
                    instead="in the data set or in a collate_fn, which workers run ahead; or once, "
                    "before the training (datasets.map, flatout pack --encode tokens)",
                )


def _tokenises(script: Script, call: ast.Call) -> bool:
    """Return whether a call turns text into numbers, by its name."""
    if "tokeniz" in last_name(call.func).lower():
        return True
    match call.func:
        case ast.Attribute(value=owner, attr=name) if name in METHODS:
            return "tokeniz" in script.source(owner).lower()
    return False


def _drawn(script: Script, part: StepPart) -> set[str]:
    """Return the names of what the loader gave; what the model generated is none of it."""
    if isinstance(part.node, ast.FunctionDef | ast.AsyncFunctionDef):
        drawn = {each.arg for each in part.node.args.args} - {"self", "tokenizer"}
    else:
        target = getattr(part.node, "target", None)
        names = ast.walk(target) if target else ()
        drawn = {each.id for each in names if isinstance(each, ast.Name)}
    for each in script.within(part.node, ast.Assign):
        # `texts, labels = batch`, `texts = batch["text"]`, `batch = next(batches)`
        is_part = isinstance(each.value, ast.Name | ast.Subscript)
        is_next = isinstance(each.value, ast.Call) and last_name(each.value.func) == "next"
        if is_next or (is_part and root_name(each.value) in drawn):
            drawn |= {n.id for t in each.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    loops: Iterator[Any] = script.within(part.node, ast.comprehension, ast.For)
    for inner in loops:
        if inner is not part.node and drawn & names_in(inner.iter):  # one text after the other
            drawn |= {n.id for n in ast.walk(inner.target) if isinstance(n, ast.Name)}
    return drawn
