"""A checkpoint is written over the only one there is."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import imported, insert_after, replaced, suggested
from flatout.analysis.source.script import Issue, Script, argument, names_in
from flatout.analysis.source.training import backwards
from flatout.records.finding import Fix

MOVES = frozenset({"replace", "rename", "move", "renames"})


def check(script: Script) -> Iterator[Issue]:
    """Report `torch.save` to the same path in each round of a training loop."""
    if script.words & MOVES and any(
        script.called(call).startswith(("os.", "shutil.")) or not script.called(call)
        for call in script.methods(*MOVES)
        if not isinstance(call.func.value, ast.Constant)  # type: ignore[attr-defined]
    ):
        return
    trained = backwards(script)
    for call in script.calls("torch.save"):
        loops = script.loops(call)
        path = argument(call, "f", 1)
        if not loops or path is None or not _is_fixed(script, path, loops[-1]):
            continue
        if not any(loops[-1] in script.ancestors(each) for each in trained):
            continue
        yield Issue(
            node=call,
            because=(
                f"a run that is killed while it writes {script.source(path)} leaves half a file, "
                "and the checkpoint before it is gone"
            ),
            instead="save next to it, then os.replace: the old file stays until then",
            fix=_fix(script, call, path),
        )


def _is_fixed(script: Script, path: ast.expr, loop: ast.AST) -> bool:
    """Return whether a path is text, or a name that the loop does not change."""
    made = script.origin(path)
    if isinstance(made, ast.Constant):
        return isinstance(made.value, str)
    changing = {
        node.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    is_join = script.called(made) == "os.path.join" or isinstance(made, ast.JoinedStr)
    if not is_join or any(
        isinstance(each, ast.Call) for each in ast.walk(made) if each is not made
    ):
        return False
    return not names_in(made) & changing


def _fix(script: Script, call: ast.Call, path: ast.expr) -> Fix | None:
    statement = script.parents[call]
    text = script.source(path)
    if not isinstance(statement, ast.Expr) or not isinstance(path, ast.Constant | ast.Name):
        return None
    draft = f"{text[:-1]}.part{text[-1]}" if isinstance(path, ast.Constant) else f'{text} + ".part"'
    if isinstance(path, ast.Name) and not isinstance(script.origin(path), ast.Constant):
        return None  # it may be a Path
    return suggested(
        replaced(script, path, draft),
        insert_after(script, statement, f"os.replace({draft}, {text})"),
        imported(script, "os", call),
    )
