"""The names in a checkpoint begin with `_orig_mod.`, so that only a compiled model can load it."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import replaced, suggested
from flatout.analysis.source.patches import has_torchs_forward
from flatout.analysis.source.script import Issue, Script
from flatout.records.finding import Fix


def check(script: Script) -> Iterator[Issue]:
    """Report `model.state_dict()` that is saved after `model = torch.compile(model)`."""
    saves = script.calls("torch.save")
    saved = [
        call
        for call in script.methods("state_dict")
        if any(each in saves for each in script.ancestors(call))
    ]
    if not saved or "_orig_mod" in script.text:
        return
    for made in script.calls("torch.compile"):
        match script.parents[made]:
            case ast.Assign(targets=[ast.Name(id=name) as target]) if made.args:
                pass
            case _:
                continue
        uses = [
            call
            for call in saved
            if script.source(call.func.value) == name  # type: ignore[attr-defined]
            and script.scope(call) is script.scope(target)
            and call.lineno > made.lineno
        ]
        if uses:
            # A class that leaves `forward` to one of torch's: compiled in place nothing of it is.
            is_in_vain = any(has_torchs_forward(script, each) for each in script.values(target))
            yield Issue(
                node=made,
                because=(
                    f"line {uses[0].lineno} saves the state of the wrapper: every name begins with "
                    "_orig_mod., and the plain model does not find its weights"
                ),
                instead=f"{name}._orig_mod.state_dict(), which has the plain names"
                if is_in_vain
                else f"{name}.compile(), which compiles in place and keeps the names",
                fix=None if is_in_vain else _fix(script, made, name),
            )


def _fix(script: Script, made: ast.Call, name: str) -> Fix | None:
    given = made.args[0]
    if not isinstance(given, ast.Name) or given.id != name or len(made.args) > 1:
        return None
    options = ", ".join(script.source(keyword) for keyword in made.keywords)
    return suggested(replaced(script, script.parents[made], f"{name}.compile({options})"))
