"""Which lines of a script may get a value later than they ask for it, by their source.

A line may where the value only goes into a running sum or into what a `print` writes. It may not
where the script branches on it, hands it on, or keeps it where somebody asks for its type.
"""

import ast
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType

SUMS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
"""Operations that a number which is not there yet takes part in."""
WRITING = {"str", "format"}
"""Calls whose text goes into a `print`."""
NUMBER_CALLS = {"float", "int", "round", "str", "abs"}
"""Calls that give a plain number or text whatever they get."""
CHECKS = {"isnan", "isinf", "isfinite", "isclose"}
FRAMES_OF_THEIR_OWN = ("<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
BRANCHES = (ast.Compare, ast.BoolOp, ast.IfExp, ast.If, ast.While, ast.Assert, ast.Not)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One statement of the script, and what it does with the numbers in it."""

    kind: str = ""
    """`print`, `sum`, or empty where a value is needed at once."""
    why: str = ""
    """Why at once."""

    @property
    def is_late(self) -> bool:
        """Tell whether values may come later here."""
        return bool(self.kind)


AT_ONCE = Site(why="its source is not to be had")


class ReadSites:
    """Looks at each statement once."""

    def __init__(self) -> None:
        self._files: dict[str, _File | None] = {}
        self._known: dict[tuple[CodeType, int], Site] = {}

    def of(self, frame: FrameType) -> Site:
        """Return what the statement that runs in a frame does with its numbers."""
        key = frame.f_code, frame.f_lineno
        site = self._known.get(key)
        if site is None:
            site = self._known[key] = self._look(*key)
        return site

    def _look(self, code: CodeType, line: int) -> Site:
        if code.co_name in FRAMES_OF_THEIR_OWN:
            return Site(why="it is read inside of a comprehension or lambda")
        name = code.co_filename
        if name not in self._files:
            self._files[name] = _parse(name)
        file = self._files[name]
        return AT_ONCE if file is None else file.site(line)


def _parse(name: str) -> "_File | None":
    lines = linecache.getlines(name)
    try:
        return _File(ast.parse("".join(lines))) if lines else None
    except SyntaxError:
        return None


class _File:
    """The statements of one file, with the way from each part to the whole."""

    def __init__(self, tree: ast.Module) -> None:
        self.parents = {
            child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)
        }
        self.lines: dict[int, list[ast.stmt]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt):
                for line in _own_lines(node):
                    self.lines.setdefault(line, []).append(node)

    def site(self, line: int) -> Site:
        """Return what the statement on a line does."""
        found = self.lines.get(line, [])
        if len(found) != 1:
            return Site(why="several statements share its line")
        (statement,) = found
        if is_print(statement):
            why = self._why_not_printed(statement)
            return Site(why=why) if why else Site(kind="print")
        target = _target(statement)
        if target is None:
            return Site(why=_words(statement, self._first_read(statement)))
        why = self._why_not_summed(statement, target, frozenset())
        return Site(why=why) if why else Site(kind="sum")

    def _first_read(self, statement: ast.stmt) -> ast.AST | None:
        """Return what the first read of a statement goes into."""
        read = next(filter(_is_read, ast.walk(statement)), None)
        return self.parents.get(read) if read is not None else None

    def _why_not_printed(self, statement: ast.stmt) -> str:
        for node in ast.walk(statement):
            if not (_is_read(node) or isinstance(node, ast.FormattedValue) or _is_writing(node)):
                continue
            for parent in self._upwards(node, statement):
                if not (isinstance(parent, ast.Expr) or _passes_text(parent)):
                    return _words(statement, parent)
        return ""

    def _why_not_summed(self, statement: ast.stmt, name: str, above: frozenset[str]) -> str:
        """Return why a name must not stand for a number that is not there yet."""
        for read in filter(_is_read, ast.walk(statement)):
            for parent in self._upwards(read, statement):
                if not (parent is statement or _passes_number(parent)):
                    return _words(statement, parent)
        return self._why_not_kept(self._scope(statement), name, above | {name})

    def _why_not_kept(self, scope: ast.AST, name: str, above: frozenset[str]) -> str:
        for node in _within(scope, name):
            if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
                return f"line {node.lineno} shares `{name}` with other functions"
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                why = self._why_not_loaded(node, above)
                if why:
                    return why
        return ""

    def _why_not_loaded(self, node: ast.Name, above: frozenset[str]) -> str:
        """Return why a use of a name wants the plain number."""
        statement = self._statement(node)
        parent = self.parents[node]
        if _asks(parent):
            return _words(statement, parent)
        is_direct = parent is statement or isinstance(parent, ast.Assign | ast.AugAssign)
        target = _target(statement)
        if is_direct and target is not None:
            return "" if target in above else self._why_not_summed(statement, target, above)
        if _passes_number(parent) or isinstance(parent, ast.FormattedValue):
            return ""
        if isinstance(parent, ast.Call) and _is_plain_call(parent, node):
            return ""
        return _words(statement, parent)

    def _upwards(self, node: ast.AST, end: ast.stmt) -> Iterator[ast.AST]:
        while node is not end:
            node = self.parents[node]
            yield node

    def _statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def _scope(self, node: ast.AST) -> ast.AST:
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                break
        return node


def is_print(statement: ast.stmt) -> bool:
    """Tell whether a statement is a `print` to the standard output."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "print"
        and all(keyword.arg in ("sep", "end", "flush") for keyword in call.keywords)
    )


def _within(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the nodes of a scope without functions that have a variable of this name themselves."""
    waiting = [scope]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if not (is_function and _binds(child, name)):
                waiting.append(child)


def _binds(function: ast.AST, name: str) -> bool:
    shares = any(
        isinstance(node, ast.Global | ast.Nonlocal) and name in node.names
        for node in ast.walk(function)
    )
    return not shares and any(
        (isinstance(node, ast.arg) and node.arg == name)
        or (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        for node in ast.walk(function)
    )


def _own_lines(statement: ast.stmt) -> Iterable[int]:
    """Return the lines of a statement, without those of the statements inside of it."""
    inner = [child for child in ast.walk(statement) if isinstance(child, ast.stmt)][1:]
    last = statement.end_lineno or statement.lineno
    if inner:
        last = min(child.lineno for child in inner)
        last = max(statement.lineno, last if last == statement.lineno else last - 1)
    return range(statement.lineno, last + 1)


def _target(statement: ast.stmt) -> str | None:
    """Return the plain name that a statement gives a value to."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, SUMS):
        target: ast.expr = statement.target
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


def _is_read(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "item"
        and not node.args
    )


def _is_writing(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    return name in WRITING or _is_format(node)


def _is_format(node: ast.Call) -> bool:
    """Tell whether a call is `"...".format(...)`."""
    return (
        isinstance(node.func, ast.Attribute)
        and node.func.attr == "format"
        and isinstance(node.func.value, ast.Constant)
    )


def _passes_number(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "round"
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, SUMS)
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd)


def _passes_text(node: ast.AST) -> bool:
    """Tell whether a part of a `print` leaves the text of a number in one piece."""
    if isinstance(node, ast.Call):
        is_print_call = isinstance(node.func, ast.Name) and node.func.id == "print"
        return is_print_call or _is_writing(node) or _passes_number(node)
    if isinstance(node, ast.FormattedValue):
        spec = node.format_spec
        parts = spec.values if isinstance(spec, ast.JoinedStr) else []
        is_fixed = all(isinstance(part, ast.Constant) for part in parts)
        return is_fixed and node.conversion == -1
    return isinstance(node, ast.JoinedStr) or _passes_number(node)


def _asks(node: ast.AST) -> bool:
    is_check = isinstance(node, ast.Call) and _called(node).rpartition(".")[2] in CHECKS
    return is_check or isinstance(node, BRANCHES)


def _is_plain_call(call: ast.Call, name: ast.Name) -> bool:
    called = _called(call)
    is_known = called in NUMBER_CALLS or called.startswith("math.") or _is_format(call)
    is_printed = called == "print" and not any(k.value is name for k in call.keywords)
    return is_known or (is_printed and all(k.arg in ("sep", "end", "flush") for k in call.keywords))


def _called(call: ast.Call) -> str:
    try:
        return ast.unparse(call.func)
    except RecursionError:
        return ""


def _words(statement: ast.stmt, parent: ast.AST | None) -> str:
    line = getattr(parent, "lineno", statement.lineno)
    if parent is not None and (_asks(parent) or isinstance(parent, ast.UnaryOp)):
        return f"line {line} branches on it"
    if isinstance(parent, ast.Call):
        return f"line {line} hands it to {_called(parent)[:40]}()"
    if isinstance(parent, ast.Return):
        return f"line {line} returns it"
    if isinstance(parent, ast.FormattedValue | ast.BinOp):
        return f"line {line} formats or computes with it in a way that needs it at once"
    return f"line {line} keeps it"
