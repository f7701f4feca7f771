"""Numbers come from numpy in fp64, and the model computes with them."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument

DOUBLE = frozenset(
    f"numpy.{name}"
    for name in ("zeros", "ones", "linspace", "random.rand", "random.randn", "random.random",
                 "random.normal", "random.uniform", "random.standard_normal", "eye")
)  # fmt: skip
"""Functions whose result is fp64 unless told otherwise."""
CASTS = frozenset(["float", "half", "bfloat16", "to", "type", "astype", "long", "int", "type_as"])


def check(script: Script) -> Iterator[Issue]:
    """Report `torch.from_numpy(np.zeros(...))` and its like that stay fp64."""
    for call in script.calls("torch.from_numpy", "torch.tensor", "torch.as_tensor"):
        if not call.args or argument(call, "dtype", 1) is not None:
            continue
        made = script.origin(call.args[0])
        if not isinstance(made, ast.Call) or script.called(made) not in DOUBLE:
            continue
        has_dtype = script.called(made) in {"numpy.zeros", "numpy.ones"}
        if argument(made, "dtype", 1 if has_dtype else None) is not None:
            continue
        if _is_cast(script, call) or _is_changed(script, call):
            continue
        yield Issue(
            node=call,
            because=(
                "numpy makes fp64, and so is this tensor: on a GPU fp64 runs at 1/2 to 1/64 of "
                "the speed, and layers in fp32 refuse it"
            ),
            instead="dtype=torch.float32 here, or dtype=np.float32 where it is made",
        )


def _is_cast(script: Script, call: ast.Call) -> bool:
    for ancestor in script.ancestors(call):
        if isinstance(ancestor, ast.stmt):
            return False
        if isinstance(ancestor, ast.Attribute) and ancestor.attr in CASTS:
            return True
    return False


def _is_changed(script: Script, call: ast.Call) -> bool:
    """Return whether the name that gets the tensor is cast somewhere, or double is meant."""
    statement = script.statement(call)
    if "float64" in script.text or "double" in script.text:
        return True
    names = {
        each.id
        for target in getattr(statement, "targets", [])
        for each in ast.walk(target)
        if isinstance(each, ast.Name)
    }
    return any(
        isinstance(each.func, ast.Attribute)
        and isinstance(each.func.value, ast.Name)
        and each.func.value.id in names
        for each in script.methods(*CASTS)
    )
