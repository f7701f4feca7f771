"""The techniques and rules: one file each, found by file name, imported only when asked for.

What a technique declares in its class is read from its source: half of those on data import torch.
"""

import ast
import functools
import importlib
import inspect
import pkgutil
import sys
import types
import typing
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from flatout.records.errors import UserError, unknown
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics, Technique

Base = TypeVar("Base")


def module_names(package: ModuleType) -> dict[str, str]:
    """Map each file or folder in the package's sub-folders to its module path, importing none.

    Files alongside the sub-folders are not in the catalog: shared code may live there.
    """
    names: dict[str, str] = {}
    for root in package.__path__:
        for family in (info.name for info in pkgutil.iter_modules([root]) if info.ispkg):
            for info in pkgutil.iter_modules([str(Path(root) / family)]):
                module = f"{package.__name__}.{family}.{info.name}"
                if info.name in names:
                    raise ValueError(
                        f"two files are called {info.name}: {names[info.name]}, {module}"
                    )
                names[info.name] = module
    return dict(sorted(names.items()))


def load_class(module_name: str, base: type[Base]) -> type[Base]:
    """Import one module and return the single subclass of `base` that it defines."""
    module = importlib.import_module(module_name)
    found = [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, base) and kind.__module__ == module_name
    ]
    if len(found) != 1:
        raise TypeError(
            f"{module_name} must define exactly one {base.__name__}, found {len(found)}"
        )
    return found[0]


def names() -> tuple[str, ...]:
    """Return the names of all techniques, in alphabetical order, importing none of them."""
    return tuple(_modules())


def technique_class(name: str) -> type[Technique]:
    """Return the class of a technique."""
    modules = _modules()
    if name not in modules:
        raise UserError(unknown("technique", name, modules))
    return load_class(modules[name], Technique)  # type: ignore[type-abstract]


def declared(attribute: str) -> dict[str, Any]:
    """Return what techniques declare for a plain class attribute, by name, importing none of them.

    >>> declared("prepared_by")
    {'packed_data': 'flatout pack'}
    """
    return {
        name: _value(member.value)
        for name, member in _members(attribute)
        if isinstance(member, ast.AnnAssign) and member.value
    }


def declaring(member: str) -> list[type[Technique]]:
    """Return the techniques whose class defines a class attribute or a method, in their order."""
    return [technique_class(name) for name, _ in _members(member)]


def setter_of(what: str) -> str:
    """Return the technique through which flatout sets something; see `Technique.sets`.

    >>> setter_of("num_workers")
    'loader_workers'
    """
    (name,) = (name for name, found in declared("sets").items() if what in found)
    return name


def only_on_request() -> frozenset[str]:
    """Return the techniques that `flatout tune` does not try unless the user asks for them."""
    return frozenset(
        name
        for name, promise in declared("numerics").items()
        if promise is Numerics.TRAINING or name in declared("prepared_by")
    )


def build(recipe: Recipe) -> tuple[Technique, ...]:
    """Return a recipe's techniques with their settings; a `UserError` if one is not allowed."""
    return tuple(_build(choice) for choice in recipe.choices)


@functools.cache
def _members(name: str) -> tuple[tuple[str, ast.stmt], ...]:
    """Return where technique classes define a member, by technique."""
    return tuple(
        (technique, member)
        for technique, module in _modules().items()
        for source in [_source(module)]
        if name in source  # saves most of the parsing
        for kind in ast.parse(source).body
        if isinstance(kind, ast.ClassDef) and "Technique" in map(ast.unparse, kind.bases)
        for member in kind.body
        if name in (getattr(member, "name", ""), getattr(getattr(member, "target", 0), "id", ""))
    )


def _source(module: str) -> str:
    *_, family, name = module.split(".")
    folder = Path(importlib.import_module("flatout.techniques").__path__[0]) / family
    path = folder / f"{name}.py"
    return (path if path.is_file() else folder / name / "__init__.py").read_text(encoding="utf-8")


def _value(node: ast.expr) -> Any:
    """Return the value that is written: plain, a set of plain ones, or a promise."""
    if isinstance(node, ast.Attribute):
        return Numerics[node.attr]
    if isinstance(node, ast.Call):
        return frozenset(ast.literal_eval(node.args[0]))
    return ast.literal_eval(node)


def _modules() -> dict[str, str]:
    return module_names(importlib.import_module("flatout.techniques"))


def _build(choice: Choice) -> Technique:
    name, kind = choice.technique, technique_class(choice.technique)
    # Of the settings alone: the types of a state may be there for the type checker only.
    written = {x.name: x.type for x in fields(kind) if x.init}  # type: ignore[arg-type]
    allowed = typing.get_type_hints(
        types.SimpleNamespace(__annotations__=written), vars(sys.modules[kind.__module__])
    )
    for setting, value in choice.settings.items():
        if setting not in allowed:
            raise UserError(f"{name}: {unknown('setting', setting, allowed)}")
        if not _is_of(value, allowed[setting]):
            raise UserError(
                f"{name}: {setting}={value!r} is not allowed; give {_words(allowed[setting])}"
            )
    try:
        return kind(**choice.settings)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a plain value has the type a setting is declared with."""
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_is_of(value, one) for one in typing.get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _words(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(value) for value in typing.get_args(hint))
    if isinstance(hint, types.UnionType):
        return " or ".join(_words(one) for one in typing.get_args(hint))
    known = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return known.get(hint, "nothing" if hint is type(None) else str(hint))
