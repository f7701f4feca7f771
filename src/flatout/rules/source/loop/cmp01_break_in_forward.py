"""A compiled model is cut into pieces by what its forward does on the host."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script

READS = frozenset({"item", "tolist", "numpy", "cpu"})


def check(script: Script) -> Iterator[Issue]:
    """Report prints and reads in the `forward` of modules of a file that compiles one of them."""
    for owner in compiled_classes(script):
        forward = script.method(owner, "forward")
        if forward is None:
            continue
        for call in script.within(forward, ast.Call):
            match call.func:
                case ast.Name(id="print"):
                    what = "print"
                case ast.Attribute(attr=name) if name in READS and not call.args:
                    what = f".{name}()"
                case _:
                    continue
            yield Issue(
                node=call,
                because=(
                    f"{what} in the forward of {owner.name} ends the compiled graph here: the "
                    "parts before and after are compiled alone"
                ),
                instead="take it out of forward, or return the tensor and read it in the loop",
            )


def compiled_classes(script: Script) -> list[ast.ClassDef]:
    """Return the classes of the file whose instances are compiled in it."""
    found = []
    for call in script.calls("torch.compile"):
        owner = script.class_of(call.args[0]) if call.args else None
        if owner is None and isinstance(script.parents[call], ast.Assign) and call.args:
            owner = _before(script, call)
        found += [owner] if owner is not None else []
    return found


def _before(script: Script, call: ast.Call) -> ast.ClassDef | None:
    """Return the class behind `model = torch.compile(model)`: what the name was before."""
    given = call.args[0]
    for value in script.values(given):
        owner = script.class_of(value) if value is not call else None
        if owner is not None:
            return owner
    return None
