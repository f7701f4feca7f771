"""Mixed precision in its old spelling, which torch is going to remove."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import imported, safe
from flatout.analysis.source.script import Issue, Script
from flatout.records.finding import Edit, Fix

NEW = {"autocast": "torch.autocast", "GradScaler": "torch.amp.GradScaler"}


def check(script: Script) -> Iterator[Issue]:
    """Report `torch.cuda.amp.autocast`, `torch.cpu.amp.autocast` and their scalers."""
    for kind in ("cuda", "cpu"):
        for name, new in NEW.items():
            for call in script.calls(f"torch.{kind}.amp.{name}"):
                if script.inside(call, ast.ExceptHandler) is not None:
                    continue  # what older versions of torch get
                yield Issue(
                    node=call,
                    because=f"torch.{kind}.amp.{name} is deprecated: it warns, and will be removed",
                    instead=f'{new}("{kind}", ...), which takes the same arguments',
                    fix=_fix(script, call, f'{new}("{kind}"'),
                )


def _fix(script: Script, call: ast.Call, head: str) -> Fix | None:
    if call.args:  # `enabled` comes first in the old one
        return None
    start, _end = script.span(call)
    name_end = script.span(call.func)[1]
    opening = script.text.index("(", name_end) + 1
    rest = script.text[opening:].lstrip()
    comma = "" if rest.startswith(")") else ", "
    edit = Edit(start=start, end=opening, text=head + comma)
    return safe(edit, imported(script, "torch", call))
