"""Edits of a script's text: arguments, lines, blocks. Every other character stays as it is.

Each function returns None where the place is written so that the edit would need a person:
several statements on a line, arguments that a generator fills.
"""

import ast
import re
import tokenize
from collections.abc import Callable, Iterable
from io import StringIO

from flatout.analysis.source.script import NotAnalysableError, Script, argument
from flatout.records.finding import Edit, Fix

Edits = Edit | Iterable["Edit | None"] | None


def suggested(*edits: Edits) -> Fix | None:
    """Return a fix that the user has to agree to; None where one of its edits is not possible."""
    return _fix(edits, is_safe=False)


def safe(*edits: Edits) -> Fix | None:
    """Return a fix after which the script computes the same numbers."""
    return _fix(edits, is_safe=True)


def _fix(edits: Iterable[Edits], *, is_safe: bool) -> Fix | None:
    found: list[Edit] = []
    for edit in edits:
        for each in [edit] if edit is None or isinstance(edit, Edit) else edit:
            if each is None:
                return None
            found.append(each)
    return Fix(edits=tuple(found), is_safe=is_safe)


def replaced(script: Script, node: ast.AST, text: str) -> Edit:
    """Return the edit that writes something else in the place of an expression."""
    start, end = script.span(node)
    return Edit(start=start, end=end, text=text)


def add_argument(  # noqa: PLR0911  one layout a line
    script: Script, call: ast.Call, text: str
) -> Edit | None:
    """Return the edit that adds an argument at the end of a call."""
    if any(isinstance(each, ast.GeneratorExp) for each in call.args):
        return None  # it may be the only argument without its own brackets
    start, end = script.span(call)
    tokens = _tokens(script.text[start:end])
    if tokens is None or tokens[-1].string != ")":
        return None
    last = tokens[-2]
    place = start + _offset(script.text[start:end], last.end)
    if last.string == "(":
        return Edit(start=place, end=place, text=text)
    if last.string != ",":
        return Edit(start=place, end=place, text=f", {text}")
    if last.end[0] == tokens[-1].start[0]:
        return Edit(start=place, end=place, text=f" {text},")
    # One argument a line: the new one gets its own, after a comment behind the last one.
    line = script.line_of(place)
    indent = _indent(script, script.line_of(start + _offset(script.text[start:end], last.start)))
    at = script.line_start(line + 1)
    return Edit(start=at, end=at, text=f"{indent}{text},{script.newline}")


def set_argument(
    script: Script, call: ast.Call, name: str, value: str, position: int | None = None
) -> Edit | None:
    """Return the edit that gives an argument another value, or adds it by its keyword."""
    given = argument(call, name, position)
    if given is not None:
        return replaced(script, given, value)
    return add_argument(script, call, f"{name}={value}")


def remove_argument(script: Script, call: ast.Call, name: str) -> Edit | None:
    """Return the edit that takes a keyword argument out, with the comma that belongs to it."""
    keyword = next((each for each in call.keywords if each.arg == name), None)
    if keyword is None:
        return None
    start, end = script.span(keyword)
    if comma := re.compile(r"[ \t]*,[ \t]*").match(script.text, end):
        return Edit(start=start, end=comma.end(), text="")
    before = script.text[:start].rstrip(" \t\r\n")
    if before.endswith(","):
        return Edit(start=len(before) - 1, end=end, text="")
    if before.endswith("("):
        return Edit(start=len(before), end=end, text="")
    return None  # a comment, or brackets around the value


def insert_before(script: Script, statement: ast.stmt, *lines: str) -> Edit | None:
    """Return the edit that writes lines above a statement, indented as it is."""
    first = _first_line(statement)
    indent = _own_indent(script, statement)
    if indent is None:
        return None
    at = script.line_start(first)
    text = "".join(f"{indent}{line}{script.newline}" for line in lines)
    return Edit(start=at, end=at, text=text)


def insert_after(script: Script, statement: ast.stmt, *lines: str) -> Edit | None:
    """Return the edit that writes lines below a statement, indented as it is."""
    indent = _own_indent(script, statement)
    if indent is None or not _ends_line(script, statement):
        return None
    at = script.line_start((statement.end_lineno or statement.lineno) + 1)
    text = "".join(f"{indent}{line}{script.newline}" for line in lines)
    if at == len(script.text) and not script.text.endswith(("\n", "\r")):
        return Edit(start=at, end=at, text=script.newline + text.rstrip("\r\n"))
    return Edit(start=at, end=at, text=text)


def remove(script: Script, statement: ast.stmt) -> Edit | None:
    """Return the edit that takes a statement's lines out; `pass` where its block would be empty."""
    if _own_indent(script, statement) is None or not _ends_line(script, statement):
        return None
    if len(script.block(statement)) == 1:
        return replaced(script, statement, "pass")
    start = script.line_start(statement.lineno)
    end = script.line_start((statement.end_lineno or statement.lineno) + 1)
    return Edit(start=start, end=end, text="")


def wrap(script: Script, statements: list[ast.stmt], header: str) -> list[Edit | None]:
    """Return the edits that put statements of one block into a new one below a header."""
    first, last = statements[0], statements[-1]
    indent = _own_indent(script, first)
    if indent is None or not _ends_line(script, last):
        return [None]
    step = "\t" if "\t" in indent else " " * 4
    inside_text = {
        line
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant | ast.JoinedStr) and hasattr(node, "end_lineno")
        for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }
    edits: list[Edit | None] = [insert_before(script, first, header)]
    for line in range(_first_line(first), (last.end_lineno or last.lineno) + 1):
        start = script.line_start(line)
        if line in inside_text or not script.text[start : script.line_start(line + 1)].strip():
            continue
        edits.append(Edit(start=start, end=start, text=step))
    return edits


def insert_after_import(script: Script, module: str, line: str) -> Edit | None:
    """Return the edit that writes a line below the import of a module and those that follow it.

    None where no import at the top of the file gives the module its own name: the line needs it.
    """
    return _below_imports(script, line, lambda each: script.imports_plainly(each, module))


def imported(script: Script, module: str, node: ast.AST) -> list[Edit | None]:
    """Return the edits after which a node can use a module by its own name: none if it can now."""
    if script.knows(module, node):
        return []
    return [_below_imports(script, f"import {module}", lambda _: True)]


def _below_imports(script: Script, line: str, begins: Callable[[ast.stmt], bool]) -> Edit | None:
    """Return the edit that writes a line below the first imports from one that begins them on."""
    last: ast.stmt | None = None
    for statement in script.tree.body:
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        if last is not None and not is_import:
            break
        if is_import and (last is not None or begins(statement)):
            last = statement
    return insert_after(script, last, line) if last is not None else None


def apply(text: str, fixes: Iterable[Fix]) -> tuple[str, int]:
    """Return a text with fixes made, and how many: one that overlaps an earlier one is left out."""
    taken: list[Edit] = []
    made = 0
    for fix in fixes:
        if any(_overlap(new, old) for new in fix.edits for old in taken):
            continue
        taken += [edit for edit in fix.edits if edit not in taken]
        made += 1
    parts, at = [], 0
    for edit in sorted(taken, key=lambda edit: (edit.start, edit.end)):
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*parts, text[at:]]), made


def is_python(text: str) -> bool:
    """Return whether a text still parses."""
    try:
        Script(text)
    except NotAnalysableError:
        return False
    return True


def _overlap(one: Edit, other: Edit) -> bool:
    if one == other:
        return one.start != one.end  # a shared import is written once, a shared change is a clash
    if one.start == one.end and other.start == other.end:
        return one.start == other.start
    return one.start < other.end and other.start < one.end


def _tokens(text: str) -> list[tokenize.TokenInfo] | None:
    """Return the tokens of an expression that mean something."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    try:
        found = list(tokenize.generate_tokens(StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return None
    return [token for token in found if token.type not in layout and token.string]


def _offset(text: str, position: tuple[int, int]) -> int:
    """Return the place in a text of a token's position: line from 1, characters."""
    at = 0
    for _ in range(position[0] - 1):
        at = text.index("\n", at) + 1
    return at + position[1]


def _first_line(statement: ast.stmt) -> int:
    above: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in above)])


def _indent(script: Script, line: int) -> str:
    text = script.text[script.line_start(line) : script.line_start(line + 1)]
    return text[: len(text) - len(text.lstrip())]


def _own_indent(script: Script, statement: ast.stmt) -> str | None:
    """Return what is before a statement on its line, None where that is other code."""
    start, _end = script.span(statement)
    before = script.text[script.line_start(statement.lineno) : start]
    return None if before.strip() else before


def _ends_line(script: Script, statement: ast.stmt) -> bool:
    """Return whether nothing but a comment follows a statement on its line."""
    _start, end = script.span(statement)
    rest = script.text[end : script.line_start((statement.end_lineno or statement.lineno) + 1)]
    return not rest.strip() or rest.lstrip().startswith("#")
