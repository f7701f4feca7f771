"""How many steps a whole training has, by what its command line and its source say.

Only what is plain is taken: a number on the command line, the default of an argument, or a
constant, under a name that means epochs or optimizer steps. Two different numbers are no answer.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from flatout.records.ablation import TrainingLength

STEPS = re.compile(r"(max|num|total|n)?_?(train|training)?_?(steps|iters|iterations)")
EPOCHS = re.compile(r"(max|num|total|n)?_?(train|training)?_?epochs")
"""Names of numbers of optimizer steps and of epochs, as scripts spell them."""
FIRST_EPOCH = re.compile(r"(start|first|initial|begin)_epoch")
"""Options of a training that goes on."""
TRAINER_ARGUMENTS = {"num_train_epochs", "max_epochs", "max_steps", "epochs", "num_epochs"}
"""Of any call: `steps=` may be those of a sampler, or of a schedule."""
STEP_LOOP = re.compile(r"step|it|iter|iteration|iter_num|global_step")
"""Variables of loops over steps."""


def find_length(
    text: str, arguments: Sequence[str], epoch_steps: int | None
) -> TrainingLength | None:
    """Return the length of a training, None where it is not plain.

    The command line wins over the script, and steps win over epochs, as in the trainers that take
    both: they end at a positive number of steps.
    """
    given = dict(_given(arguments))
    first = next(((x, n) for x, n in given.items() if FIRST_EPOCH.fullmatch(x)), None)
    written = _written(text)
    for known in (given, written):
        for pattern, factor in ((STEPS, 1), (EPOCHS, epoch_steps)):
            found = {
                name: value for name, value in known.items() if pattern.fullmatch(name) and value
            }
            if not found:
                continue
            if factor is None or len(set(found.values())) > 1:
                return None
            name, value = next(iter(found.items()))
            words = f"--{name} {value}" if known is given else f"{name} = {value}"
            if pattern is EPOCHS and first is not None:
                words, value = f"{words}, --{first[0]} {first[1]}", value - first[1]
            return TrainingLength(steps=float(value * factor), source=words) if value > 0 else None
    return None


def _given(arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield names and whole numbers of options, as `--epochs 3`, `--epochs=3` or `epochs=3`."""
    for word, after in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, is_set, value = word.lstrip("-").partition("=")
        number = value if is_set else after if word.startswith("-") else ""
        if number.isdecimal():
            yield name.rpartition(".")[2].replace("-", "_").lower(), int(number)


def _written(text: str) -> Mapping[str, int]:
    """Return the whole numbers that the script gives to arguments, constants and parameters.

    A name with two numbers is left out, and so is a script that cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found: dict[str, set[int]] = {}
    for node in ast.walk(tree):
        for name, value in _numbers_of(node):
            found.setdefault(name.replace("-", "_").lower(), set()).add(value)
    if "epoch" not in text.lower():
        for value in _outer_loops(tree):
            found.setdefault("steps", set()).add(value)
    known = {name: min(values) for name, values in found.items() if len(values) == 1}
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For))
    has_epochs = any("epoch" in getattr(loop.target, "id", "").lower() for loop in loops)
    # Within a loop over epochs so many steps may be those of one epoch, a limit, or a sampler's.
    return {} if has_epochs and any(map(STEPS.fullmatch, known)) else known


def _numbers_of(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield what one piece of source says, 0 aside: it is a counter's beginning, or no limit."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from _number(getattr(target, "id", ""), node.value)
    elif isinstance(node, ast.For) and "epoch" in getattr(node.target, "id", "").lower():
        yield from _number("epochs", _end_of_range(node.iter))
    elif isinstance(node, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        for name in TRAINER_ARGUMENTS & keywords.keys():
            yield from _number(name, keywords[name])
        if getattr(node.func, "attr", "") in {"add_argument", "option"}:
            for word in node.args:
                if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                    yield from _number(str(word.value)[2:], keywords.get("default"))


def _outer_loops(tree: ast.AST) -> Iterator[int]:
    """Yield the steps of loops over steps that are in no other loop."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.For | ast.While):
            waiting.extend(ast.iter_child_nodes(node))
        elif isinstance(node, ast.For) and STEP_LOOP.fullmatch(getattr(node.target, "id", "")):
            yield from (value for _, value in _number("steps", _end_of_range(node.iter)))


def _end_of_range(loop: ast.expr) -> ast.expr | None:
    """Return what a loop over a range counts to, where it counts from nothing."""
    if isinstance(loop, ast.Call) and getattr(loop.func, "id", "") == "range":
        return loop.args[0] if len(loop.args) == 1 else None
    return None


def _number(name: str, value: ast.expr | None) -> Iterator[tuple[str, int]]:
    if name and isinstance(value, ast.Constant) and type(value.value) is int and value.value:
        yield name, value.value
