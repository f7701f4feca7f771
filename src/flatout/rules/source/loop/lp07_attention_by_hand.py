"""Attention is written out, so that the whole matrix of scores is stored."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument, names_in

PRODUCTS = ("torch.matmul", "torch.bmm", "torch.einsum")


def check(script: Script) -> Iterator[Issue]:
    """Report `softmax(q @ k.transpose(-2, -1) ...) @ v` in a `forward`."""
    if "scaled_dot_product_attention" in script.text:
        return
    for function in script.nodes(ast.FunctionDef):
        is_forward = function.name == "forward" or "attention" in function.name.lower()
        if is_forward and "softmax" in script.source(function):
            yield from _by_hand(script, function)


def _by_hand(script: Script, function: ast.FunctionDef) -> Iterator[Issue]:
    scores: set[str] = set()
    weights: dict[str, ast.Call] = {}
    for node in script.within(function, ast.Assign):
        names = {each.id for each in node.targets if isinstance(each, ast.Name)}
        softmax = _softmax(script, node.value)
        if softmax is not None and (names_in(softmax) & scores or _scores(script, softmax)):
            weights.update(dict.fromkeys(names, softmax))
        elif _scores(script, node.value) or (names & scores and names_in(node.value) & scores):
            scores |= names
        elif names_in(node.value) & set(weights) and _first_product(script, node.value) is None:
            held = next(each for each in weights if each in names_in(node.value))
            weights.update(dict.fromkeys(names, weights[held]))  # dropout
    for product in script.within(function, ast.BinOp, ast.Call):
        left = _first_product(script, product)
        if isinstance(left, ast.Call) and left.args:
            left = left.args[0]  # `self.dropout(weights) @ v`
        if (
            isinstance(left, ast.Name)
            and left.id in weights
            and not _returns(script, function, left.id)
        ):
            yield Issue(
                node=weights[left.id],
                because=(
                    "the scores of all pairs are written to memory and read again, forward and "
                    "backward: it grows with the square of the length"
                ),
                instead="torch.nn.functional.scaled_dot_product_attention(q, k, v, ...)",
            )
            return


def _softmax(script: Script, value: ast.expr) -> ast.Call | None:
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            is_method = isinstance(node.func, ast.Attribute) and node.func.attr == "softmax"
            if is_method or script.qualified(node.func).endswith(".softmax"):
                return node
    return None


def _scores(script: Script, value: ast.AST) -> bool:
    """Return whether a product's second factor is transposed in its last two dimensions."""
    for node in ast.walk(value):
        second: ast.expr | None = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            second = node.right
        elif script.called(node) in PRODUCTS[:2]:
            second = argument(node, "other", 1)  # type: ignore[arg-type]
        match second:
            case ast.Call(func=ast.Attribute(attr="transpose"), args=[one, two]):
                if {script.source(one), script.source(two)} == {"-1", "-2"}:
                    return True
            case ast.Attribute(attr="mT"):
                return True
    return False


def _first_product(script: Script, node: ast.AST) -> ast.expr | None:
    """Return the first factor of a matrix product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left
    if isinstance(node, ast.Call) and script.called(node) in PRODUCTS[:2] and node.args:
        return node.args[0]
    return None


def _returns(script: Script, function: ast.FunctionDef, name: str) -> bool:
    """Return whether a function hands its attention weights out: then they are needed."""
    handed_out = [node.value for node in script.within(function, ast.Return)]
    handed_out += [e for value in handed_out if isinstance(value, ast.Tuple) for e in value.elts]
    return any(isinstance(value, ast.Name) and value.id == name for value in handed_out)
