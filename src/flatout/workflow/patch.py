"""Write a recipe as a diff of the script."""

from dataclasses import dataclass
from pathlib import Path

from flatout.analysis.source.edits import apply, is_python
from flatout.analysis.source.patches import source_fix
from flatout.analysis.source.script import NotAnalysableError, Script
from flatout.records import catalogue
from flatout.records.errors import UserError
from flatout.records.files import unified_diff
from flatout.records.recipe import Recipe
from flatout.workflow.check_worker import decode, read_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPatch:
    """A script with a recipe written into it."""

    diff: str
    written: tuple[str, ...]
    """Names of the techniques that are in the diff."""
    left_out: tuple[str, ...]
    """Those that have no clear place in this script, or no form in source at all."""


def patch(recipe: Recipe, path: Path) -> ScriptPatch:
    """Return the unified diff that does to a script what a recipe does to its run.

    Raises:
        UserError: if the script cannot be read as Python.
    """
    try:
        text, encoding = decode(read_bytes(path))
        new, written = text, []
        for choice in recipe.choices:
            kind = catalogue.technique_class(choice.technique)
            settings = {**kind().settings(), **choice.settings}
            fix = source_fix(Script(new), kind.source, settings) if kind.source else None
            changed = apply(new, [fix])[0] if fix is not None else new
            if changed != new and is_python(changed):
                new = changed
                written.append(choice.technique)
    except NotAnalysableError as error:
        raise UserError(f"{path} cannot be patched: {error}") from None
    left_out = tuple(name for name in recipe.names if name not in written)
    before, after = text.encode(encoding), new.encode(encoding)
    return ScriptPatch(
        diff=unified_diff(path, before, after), written=tuple(written), left_out=left_out
    )
