"""One parsed script: its nodes, what names mean, where values come from."""

import ast
import bisect
import re
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from typing import TypeVar

from flatout.records.finding import Fix

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef

LINE_END = re.compile(r"\r\n|\r|\n")
IGNORED = re.compile(r"#\s*flatout:\s*ignore(?:\[([A-Za-z0-9_,\s]*)\])?")
MAX_HOPS = 8
"""Assignments that are followed from a name to the value behind it."""
SAME_NAME = (
    ("torch.utils.data.dataloader.", "torch.utils.data."),
    ("torch.utils.data.dataset.", "torch.utils.data."),
    ("torch.utils.data.distributed.", "torch.utils.data."),
    ("torch.nn.parallel.data_parallel.", "torch.nn."),
    ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
    ("torch.nn.parallel.DataParallel", "torch.nn.DataParallel"),
    ("torch.cuda.amp.autocast_mode.", "torch.cuda.amp."),
    ("torch.cuda.amp.grad_scaler.", "torch.cuda.amp."),
    ("torch.amp.autocast_mode.", "torch.amp."),
    ("torch.amp.grad_scaler.", "torch.amp."),
    ("torch.autocast", "torch.amp.autocast"),
    ("torch.nn.utils.clip_grad.", "torch.nn.utils."),
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.autograd.anomaly_mode.", "torch.autograd."),
    ("torch.autograd.grad_mode.", "torch."),
    ("torch.autograd.no_grad", "torch.no_grad"),
    ("torch.autograd.inference_mode", "torch.inference_mode"),
)
"""Places where torch has the same object, and the name that rules use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """What a rule says about a node: the finding without its code and its place."""

    node: ast.AST
    because: str
    instead: str
    fix: Fix | None = None


class NotAnalysableError(ValueError):
    """The text is no Python that can be parsed; the message says where and why."""


class Script:
    """A parsed script.

    Raises:
        NotAnalysableError: if it does not parse.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = _parse(text)
        self.parents: dict[ast.AST, ast.AST] = {}
        self._by_type: dict[type, list[ast.AST]] = defaultdict(list)
        self._order: list[ast.AST] = []
        self._number(self.tree)
        self._starts = [0, *(match.end() for match in LINE_END.finditer(text))]
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.imports = self._read_imports()
        self._attributes: dict[ast.ClassDef, dict[str, list[ast.AST]]] = {}
        self._bindings: dict[ast.AST, dict[str, list[ast.AST]]] = {}

    def _number(self, root: ast.AST) -> None:
        """Note the nodes in the order of the source, each one's parent and where its own end."""
        order, parents, by_type = self._order, self.parents, self._by_type
        waiting = [root]
        while waiting:
            node = waiting.pop()
            by_type[node.__class__].append(node)
            order.append(node)
            children = []
            for name in node._fields:
                value = getattr(node, name, None)
                if value.__class__ is list:
                    children += [each for each in value if isinstance(each, ast.AST)]
                elif isinstance(value, ast.AST) and value._fields:
                    # What has no fields is one object for the whole tree: Load(), Add().
                    children.append(value)
            for child in children:
                parents[child] = node
            children.reverse()
            waiting += children
        # The last of a node's own is the last of its last child's.
        self._places = {node: at for at, node in enumerate(order)}
        self._ends = ends = {node: at + 1 for node, at in self._places.items()}
        for node in reversed(order):
            if (parent := parents.get(node)) is not None and ends[node] > ends[parent]:
                ends[parent] = ends[node]

    def nodes(self, *kinds: type[Node]) -> Iterator[Node]:
        """Yield all nodes of the given types."""
        for kind in kinds:
            yield from self._by_type.get(kind, ())  # type: ignore[misc]

    def offset(self, line: int, byte_column: int) -> int:
        """Return the position in the text of a parser's position: line from 1, bytes of UTF-8."""
        start = self._starts[line - 1]
        end = self._starts[line] if line < len(self._starts) else len(self.text)
        head = self.text[start:end]
        if head.isascii():
            return start + byte_column
        return start + len(head.encode("utf-8")[:byte_column].decode("utf-8", "ignore"))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where an expression or a statement begins and ends; decorators left out."""
        return (
            self.offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self.offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def source(self, node: ast.AST) -> str:
        """Return the text of an expression or a statement."""
        start, end = self.span(node)
        return self.text[start:end]

    def line_start(self, line: int) -> int:
        """Return where a line begins; the end of the text for the one after the last."""
        return self._starts[line - 1] if line <= len(self._starts) else len(self.text)

    def line_of(self, offset: int) -> int:
        """Return the line of a position in the text."""
        return bisect.bisect_right(self._starts, offset)

    @cached_property
    def ignored(self) -> dict[int, frozenset[str] | None]:
        """The codes that a comment silences, by line; None for all codes."""
        found: dict[int, frozenset[str] | None] = {}
        if "flatout:" not in self.text:
            return found
        try:
            for token in tokenize.generate_tokens(StringIO(self.text).readline):
                if token.type == tokenize.COMMENT and (match := IGNORED.search(token.string)):
                    codes = match[1]
                    words = re.findall(r"\w+", codes.upper()) if codes is not None else None
                    found[token.start[0]] = None if words is None else frozenset(words)
        except (tokenize.TokenError, SyntaxError):
            pass  # what came before the odd token counts
        return found

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node is in, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def inside(self, node: ast.AST, *kinds: type[Node]) -> Node | None:
        """Return the innermost node of the given types around a node, in any scope."""
        return next((a for a in self.ancestors(node) if isinstance(a, kinds)), None)

    def function(self, node: ast.AST) -> Function | None:
        """Return the function that a node is in."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((a for a in self.ancestors(node) if isinstance(a, kinds)), None)

    def scope(self, node: ast.AST) -> Scope:
        """Return the function, lambda, class or module whose names a node sees first."""
        return self.inside(node, *_OWN_SCOPE) or self.tree

    def loops(self, node: ast.AST) -> list[Loop]:
        """Return the loops around a node within its function, innermost first."""
        found: list[Loop] = []
        child = node
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                break
            if isinstance(ancestor, ast.For | ast.AsyncFor | ast.While):
                # The iterable of a `for` and the `else` of a loop run once.
                once = {id(getattr(ancestor, "iter", None)), *map(id, ancestor.orelse)}
                if id(child) not in once:
                    found.append(ancestor)
            child = ancestor
        return found

    def are_alternatives(self, one: ast.AST, other: ast.AST) -> bool:
        """Return whether two nodes are in different branches of one `if`."""
        path = [other, *self.ancestors(other)]
        child = one
        for ancestor in self.ancestors(one):
            if isinstance(ancestor, ast.If) and ancestor in path:
                there = path[path.index(ancestor) - 1]
                return (child in ancestor.body and there in ancestor.orelse) or (
                    child in ancestor.orelse and there in ancestor.body
                )
            child = ancestor
        return False

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that a node is in, or the node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the block that a statement is in."""
        parent = self.parents[statement]
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, None)
            if isinstance(block, list) and any(each is statement for each in block):
                return block
        return [statement]

    def within(self, root: ast.AST, *kinds: type[Node]) -> Iterator[Node]:
        """Yield the nodes below a root, in order, without entering nested functions or classes."""
        order, ends = self._order, self._ends
        at = self._places[root] + 1
        end = ends[root]
        while at < end:
            node = order[at]
            if isinstance(node, kinds):
                yield node
            at = ends[node] if isinstance(node, _OWN_SCOPE) else at + 1

    def walk(self, root: ast.AST) -> list[ast.AST]:
        """Return a node of the script and all below it, nested functions and classes too."""
        return self._order[self._places[root] : self._ends[root]]

    def _read_imports(self) -> dict[str, str]:
        """Return what each imported name means, as a dotted name."""
        found: dict[str, str] = {}
        for plain in self.nodes(ast.Import):
            for item in plain.names:
                name = item.asname or item.name.partition(".")[0]
                found[name] = item.name if item.asname else name
        for source in self.nodes(ast.ImportFrom):
            module = "." * source.level + (source.module or "")
            for item in source.names:
                found[item.asname or item.name] = f"{module}.{item.name}"
        return found

    def knows(self, module: str, node: ast.AST) -> bool:
        """Return whether a module has its own name where a node is, by an import that it sees."""
        around = {self.tree, *self.ancestors(node)}
        return any(
            self.imports_plainly(each, module) and self.scope(each) in around
            for each in self.nodes(ast.Import)
        )

    def imports_plainly(self, statement: ast.AST, module: str) -> bool:
        """Return whether a statement imports a module by its own name, which means it all along."""
        if not isinstance(statement, ast.Import) or self.imports.get(module) != module:
            return False
        names = [item.asname or item.name.partition(".")[0] for item in statement.names]
        return module in names

    @cached_property
    def uses_torch(self) -> bool:
        """Whether the script imports torch or something that trains with it."""
        roots = {name.partition(".")[0] for name in self.imports.values()}
        return not roots.isdisjoint(
            {"torch", "accelerate", "lightning", "pytorch_lightning", "transformers"}
        )

    @cached_property
    def words(self) -> frozenset[str]:
        """All names and attributes of the script."""
        found = {node.id for node in self.nodes(ast.Name)}
        return frozenset(found | {node.attr for node in self.nodes(ast.Attribute)})

    def qualified(self, node: ast.AST | None) -> str:
        """Return the dotted name that a name or attribute means after imports, "" if unknown.

        >>> script = Script("import torch.nn as nn; nn.Linear(1, 1)")
        >>> script.qualified(next(script.nodes(ast.Call)).func)
        'torch.nn.Linear'
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imports:
            return ""
        if node.id in self._bound_names and self._is_shadowed(node):
            return ""
        name = ".".join([self.imports[node.id], *reversed(parts)])
        for there, here in SAME_NAME:
            if name == there or (there.endswith(".") and name.startswith(there)):
                return here + name[len(there) :]
        return name

    @cached_property
    def _bound_names(self) -> frozenset[str]:
        """All names that are bound other than by an import, in any scope."""
        found = {node.id for node in self.nodes(ast.Name) if isinstance(node.ctx, ast.Store)}
        found |= {node.arg for node in self.nodes(ast.arg)}
        return frozenset(found).union(self.functions, self.classes)

    def _is_shadowed(self, name: ast.Name) -> bool:
        """Return whether a parameter or an assignment of a function hides an imported name."""
        return any(
            name.id in self.bindings(scope)
            for scope in self._scopes(name)
            if not isinstance(scope, ast.Module | ast.ClassDef)
        )

    def _scopes(self, node: ast.AST) -> Iterator[Scope]:
        """Yield the scopes in which a name is looked up: classes only from their own body."""
        first = True
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, ast.ClassDef) and not first:
                continue
            if isinstance(ancestor, _OWN_SCOPE):
                first = False
                yield ancestor

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of things with one of these dotted names; `x.` means all below x."""
        prefixes = tuple(name for name in names if name.endswith("."))
        return [
            call
            for name, calls in self._calls_by_name.items()
            if name in names or (prefixes and name.startswith(prefixes))
            for call in calls
        ]

    @cached_property
    def _calls_by_name(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.nodes(ast.Call):
            if name := self.qualified(call.func):
                found[name].append(call)
        return found

    def methods(self, *names: str) -> list[ast.Call]:
        """Return the calls of attributes with one of these names, whatever they are called on."""
        found = (call for name in names for call in self._calls_by_last_name.get(name, ()))
        return [call for call in found if isinstance(call.func, ast.Attribute)]

    def called(self, call: ast.AST) -> str:
        """Return the dotted name of what a call calls, "" if unknown or no call."""
        return self.qualified(call.func) if isinstance(call, ast.Call) else ""

    def calls_of(self, function: Function) -> list[ast.Call]:
        """Return the calls of a function of this file, by its name."""
        return self._calls_by_last_name.get(function.name, [])

    @cached_property
    def _calls_by_last_name(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.nodes(ast.Call):
            found[last_name(call.func)].append(call)
        return found

    def bindings(self, scope: Scope) -> dict[str, list[ast.AST]]:
        """Return what each name of a scope is bound to, in order.

        An expression for `name = expression`; the binding node itself (a loop, a `with`, an
        argument, a definition, a tuple's assignment) where no single expression is its value.
        """
        if scope in self._bindings:
            return self._bindings[scope]
        found = self._bindings[scope] = defaultdict(list)
        arguments = getattr(scope, "args", None)
        for node in ast.walk(arguments) if arguments else ():
            if isinstance(node, ast.arg):
                found[node.arg].append(node)
        for node in self.within(scope, ast.AST):
            if node.__class__ not in BINDING:
                continue
            for target, value in _assigned(node):
                for name in ast.walk(target):
                    # `torch.backends.x = True` and `rows[0] = 1` bind neither torch nor rows.
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        found[name.id].append(value if name is target else node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[node.name].append(node)
        return found

    def values(self, node: ast.expr) -> list[ast.AST]:
        """Return what a name or an attribute of `self` is bound to; empty where unknown."""
        if isinstance(node, ast.Name):
            for scope in self._scopes(node):
                if found := self.bindings(scope).get(node.id):
                    return found
        if is_self_attribute(node):
            owner = self.inside(node, ast.ClassDef)
            if owner is not None:
                return self.attributes(owner).get(last_name(node), [])
        return []

    def attributes(self, owner: ast.ClassDef) -> dict[str, list[ast.AST]]:
        """Return what the methods of a class assign to attributes of `self`."""
        if owner not in self._attributes:
            found = self._attributes[owner] = defaultdict(list)
            for node in self.walk(owner):
                for target, value in _assigned(node) if node.__class__ in BINDING else ():
                    if is_self_attribute(target):
                        found[last_name(target)].append(value)
        return self._attributes[owner]

    def origin(self, node: ast.AST) -> ast.AST:
        """Return the expression that a name stands for, through plain assignments.

        Where a name has several values, the last one assigned before the name is used; the name
        where that cannot be said.
        """
        for _ in range(MAX_HOPS):
            if not isinstance(node, ast.Name | ast.Attribute):
                return node
            found = self.values(node)
            if not found:
                return node
            if len(found) > 1:
                before = [v for v in found if getattr(v, "lineno", 0) < node.lineno]
                found = before or found
            if not isinstance(found[-1], ast.expr) or found[-1] is node:
                return node
            node = found[-1]
        return node

    def origins(self, node: ast.AST) -> list[ast.AST]:
        """Return the expressions that a name may stand for: `origin`, and the other branches'."""
        last = self.origin(node)
        values = self.values(node) if isinstance(node, ast.Name | ast.Attribute) else []
        others = [each for each in values if self.are_alternatives(each, last)]
        return [last, *(each for each in others if isinstance(each, ast.expr))]

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class of this file that an expression is an instance of."""
        made = self.origin(node)
        if isinstance(made, ast.Call) and isinstance(made.func, ast.Name):
            return self.classes.get(made.func.id)
        return None

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes of the file by name."""
        return {node.name: node for node in self.nodes(ast.ClassDef)}

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The functions and methods of the file by name; of several with one name the last."""
        found: list[Function] = [*self.nodes(ast.FunctionDef)]
        found += self.nodes(ast.AsyncFunctionDef)
        return {node.name: node for node in found}

    def bases(self, owner: ast.ClassDef) -> set[str]:
        """Return the dotted names of a class's bases, those of bases in this file with them."""
        found: set[str] = set()
        waiting, seen = [owner], set()
        while waiting:
            each = waiting.pop()
            seen.add(each.name)
            for base in each.bases:
                found.add(self.qualified(base) or last_name(base))
                name = last_name(base)
                if name in self.classes and name not in seen:
                    waiting.append(self.classes[name])
        return found

    def method(self, owner: ast.ClassDef, name: str) -> Function | None:
        """Return a method that a class itself defines."""
        return next(
            (
                node
                for node in owner.body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
            ),
            None,
        )


_OWN_SCOPE = (
    ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef
)  # fmt: skip


def _parse(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes are the script's own affair
            return ast.parse(text)
    except SyntaxError as error:
        raise NotAnalysableError(f"line {error.lineno or 1}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise NotAnalysableError("nested too deeply for Python's parser") from None
    except ValueError as error:
        raise NotAnalysableError(str(error)) from None


BINDING = frozenset(
    (
        *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign, ast.For, ast.AsyncFor),
        *(ast.withitem, ast.comprehension, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    )
)
"""Nodes that bind names; most nodes do not."""


def _assigned(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """Return the targets of a node with what each is bound to."""
    pairs: list[tuple[ast.AST, ast.AST]] = []
    match node:
        case ast.Assign():
            for target in node.targets:
                pairs += _paired(target, node.value, node)
        case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
            pairs = [(node.target, value)]
        case ast.AugAssign() | ast.For() | ast.AsyncFor() | ast.comprehension():
            pairs = [(node.target, node)]
        case ast.withitem(optional_vars=ast.expr() as target):
            pairs = [(target, node.context_expr)]
    return pairs


def _paired(target: ast.expr, value: ast.expr, node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """Return `a, b = x, y` as two assignments."""
    is_tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    if is_tuples and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]
        return list(zip(target.elts, value.elts, strict=True))  # type: ignore[attr-defined]
    return [(target, value if isinstance(target, ast.Name) else node)]


def is_self_attribute(node: ast.AST) -> bool:
    """Return whether an expression is `self.something`."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def last_name(node: ast.AST | None) -> str:
    """Return the last word of a name or an attribute, "" for anything else.

    >>> last_name(ast.parse("a.b.C", mode="eval").body)
    'C'
    """
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def root_name(node: ast.AST) -> str:
    """Return the name that attributes, subscripts and calls start from, "" if it is no name."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def names_in(node: ast.AST) -> set[str]:
    """Return the names and attributes that occur below a node."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute):
            found.add(each.attr)
    return found


def same(one: ast.AST, other: ast.AST) -> bool:
    """Return whether two nodes are written alike, their layout aside."""
    first, second = (ast.dump(node).replace("ctx=Store()", "ctx=Load()") for node in (one, other))
    return first == second


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return an argument by its keyword, or by its position where it has one."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and position < len(call.args):
        return call.args[position]
    return None


def has_unpacked(call: ast.Call) -> bool:
    """Return whether `*args` or `**kwargs` may pass more than is written."""
    return any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(each, ast.Starred) for each in call.args
    )


def constant(node: ast.AST | None) -> object:
    """Return the value of a literal, None for anything else."""
    return node.value if isinstance(node, ast.Constant) else None
