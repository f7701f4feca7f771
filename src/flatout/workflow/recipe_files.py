"""Recipes as TOML files: written for people, read with helpful refusals."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.records.catalogue import build
from flatout.records.errors import UserError, unknown
from flatout.records.files import replace_text
from flatout.records.input_files import read_toml
from flatout.records.parallel import spec_from_toml, spec_to_toml
from flatout.records.recipe import Choice, Recipe

TABLES = ("flatout", "workload", "technique", "parallel", "about")
"""What a recipe file may hold at its top."""

HEADER = "# A flatout recipe. To train with it: flatout run --with {name} train.py\n\n"


def read_recipe(path: str | Path, *, may_spread: bool = False) -> Recipe:
    """Return the recipe in a file, checked: every technique and setting in it exists.

    With `may_spread` it may have a table `[parallel]`, which not every command goes by.
    """
    source = Path(path)
    plain = _load(source)
    try:
        recipe = recipe_from_toml(plain)
        build(recipe)
        if recipe.parallel is not None and not may_spread:
            raise UserError("only 'flatout run' goes by [parallel]: take the table out for this")
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return recipe


def write_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a recipe, whole or not at all."""
    target = Path(path)
    text = HEADER.format(name=target.name) + _toml(recipe_to_toml(recipe))
    try:
        replace_text(target, text)
    except OSError as error:
        raise UserError(
            f"cannot write the recipe to {target}: {error.strerror or error}; "
            "name a folder that can be written"
        ) from error


def _toml(tables: Mapping[str, Any]) -> str:
    """Return the text of a recipe file: tables, and lists of tables, of plain values.

    >>> print(_toml({"about": {"ratio": 2.0}, "technique": [{"name": "tf32"}]}))
    [about]
    ratio = 2.0
    <BLANKLINE>
    [[technique]]
    name = "tf32"
    <BLANKLINE>
    """
    parts = []
    for name, content in tables.items():
        heading, rows = f"[{name}]", [content]
        if isinstance(content, list):
            heading, rows = f"[[{name}]]", content
        for row in rows:
            lines = (f"{_toml_key(key)} = {_toml_value(value)}\n" for key, value in row.items())
            parts.append(f"{heading}\n{''.join(lines)}")
    return "\n".join(parts)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(k)} = {_toml_value(v)}" for k, v in _without_none(value).items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):
        # JSON escapes as TOML does, but for the one control character that JSON leaves alone.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def recipe_to_toml(recipe: Recipe) -> dict[str, Any]:
    """Return the tables of a recipe file. TOML has no null: a setting of None is left out."""
    spread = {"parallel": spec_to_toml(recipe.parallel)} if recipe.parallel else {}
    return {
        "flatout": {"version": __version__},
        "workload": {"training_loaders": list(recipe.training_loaders)},
        **spread,
        "technique": [
            {"name": choice.technique} | _without_none(choice.settings) for choice in recipe.choices
        ],
        "about": _without_none(recipe.about),
    }


def recipe_from_toml(plain: Mapping[str, Any]) -> Recipe:
    """Return the recipe that the tables of a file hold."""
    for name in plain:
        if name not in TABLES:
            raise UserError(unknown("table", name, TABLES))
    _check_version(_table(plain, "flatout", "version").get("version"))
    loaders = _table(plain, "workload", "training_loaders").get("training_loaders", [])
    if not isinstance(loaders, list) or not all(isinstance(item, str) for item in loaders):
        raise UserError("workload.training_loaders must be a list of texts")
    return Recipe(
        choices=_choices(plain.get("technique", [])),
        training_loaders=tuple(loaders),
        parallel=spec_from_toml(_table(plain, "parallel")) if "parallel" in plain else None,
        about=_table(plain, "about"),
    )


def is_compatible(written: str, running: str = __version__) -> bool:
    """Return whether a recipe of one version can be used by another: below 1.0 the minor counts.

    >>> is_compatible("0.1.7", "0.1.0"), is_compatible("0.2.0", "0.1.0")
    (True, False)
    >>> is_compatible("1.2.0", "1.9.3"), is_compatible("2.0.0", "1.9.3")
    (True, False)
    """
    return _series(written) == _series(running)


def _series(version: str) -> tuple[str, ...]:
    major, *rest = version.split(".")
    return (major, *rest[:1]) if major == "0" else (major,)


def _check_version(version: object) -> None:
    if not isinstance(version, str):
        raise UserError(
            "not a flatout recipe: it has no version; it needs the lines [flatout] and "
            f'version = "{__version__}"'
        )
    if not is_compatible(version):
        raise UserError(
            f"written by flatout {version}, this is {__version__}; tune again with "
            f"'flatout tune', or install flatout {version}"
        )


def _load(source: Path) -> dict[str, Any]:
    try:
        return read_toml(source)
    except FileNotFoundError:
        raise UserError(
            f"there is no recipe at {source}; 'flatout tune train.py' writes one"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read the recipe {source}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{source} is not a recipe, it is not valid TOML: {error}") from error


def _table(plain: Mapping[str, Any], name: str, *allowed: str) -> dict[str, Any]:
    """Return a table, which may hold nothing but the allowed keys where some are given."""
    table = plain.get(name, {})
    if not isinstance(table, dict):
        raise UserError(f"{name!r} must be a table: write [{name}] on a line of its own")
    for key in table:
        if allowed and key not in allowed:
            raise UserError(unknown("key", f"{name}.{key}", [f"{name}.{x}" for x in allowed]))
    return table


def _choices(entries: Any) -> tuple[Choice, ...]:
    """Return the techniques, each there once: of two settings no one could tell which holds."""
    if not isinstance(entries, list):
        raise UserError("techniques are a list: write [[technique]] with two brackets")
    choices: dict[str, Choice] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise UserError("each [[technique]] needs a name; 'flatout techniques' lists them")
        name = entry["name"]
        if name in choices:
            raise UserError(f"{name} is there twice; leave one [[technique]] of it")
        settings = {key: value for key, value in entry.items() if key != "name"}
        choices[name] = Choice(technique=name, settings=settings)
    return tuple(choices.values())


def _without_none(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}
