"""What the source is like to read, in numbers: `python -m benchmarks.structure [FOLDER]`.

Counts from the code alone, so that two trees can be compared: lines, modules, their median,
functions per 1,000 lines, modules that one other imports, class names with several meanings, module
globals that functions change, and `Any`; of the tree that runs, the frames from a command to its
trial's process. The budgets are checked by `tests/test_budgets.py`.
"""

import ast
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/flatout"
SMALL_LINES = 40
"""A module below this that is no plug-in and no package's face belongs into its importer."""
CHANGING = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "setdefault",
        "update",
    ]
)
"""Methods that change a list, set or mapping."""


WALK = """
import os, runpy, sys

def look(event, _arguments):
    if event != "subprocess.Popen":
        return
    frame, files = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_name != "<module>":
            files.append(frame.f_code.co_filename)
        frame = frame.f_back
    if any("/flatout/launch/" in file for file in files):
        os.write(1, str(sum("/flatout/" in file for file in files)).encode())
        os._exit(0)

sys.addaudithook(look)
sys.argv = ["flatout", sys.argv[1], "train.py"]
runpy.run_module("flatout", run_name="__main__")
"""
"""Runs a command until it starts its first trial, and writes the functions of ours that wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file of the source."""

    path: Path
    name: str
    lines: int
    tree: ast.Module

    @property
    def is_face(self) -> bool:
        """Whether it is what a package shows of itself."""
        return self.path.name == "__init__.py"


def modules_of(source: Path) -> dict[str, Module]:
    """Return the modules below a package's folder, by dotted name; empty files left out."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(source.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if text.strip():
            found[name] = Module(
                path=path, name=name, lines=len(text.splitlines()), tree=ast.parse(text)
            )
    return found


def importers(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return which modules import each module."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            for item in node.names:
                inner = f"{node.module}.{item.name}"
                found[inner if inner in modules else node.module].add(module.name)
    return found


def folder_lines(modules: Mapping[str, Module], source: Path) -> Counter[str]:
    """Return the lines of each folder directly below the source."""
    lines: Counter[str] = Counter()
    for module in modules.values():
        parts = module.path.relative_to(source).parts
        lines[parts[0] if len(parts) > 1 else ""] += module.lines
    return lines


def folder_files(modules: Mapping[str, Module], source: Path) -> Counter[str]:
    """Return the number of modules lying flat in each folder; faces left out."""
    return Counter(
        str(module.path.parent.relative_to(source))
        for module in modules.values()
        if not module.is_face
    )


def repeated_classes(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Return the public class names that several modules define."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def mutable_globals(modules: Mapping[str, Module]) -> list[str]:
    """Return the module globals that functions change, as `module.name`."""
    return sorted(
        f"{module.name}.{name}" for module in modules.values() for name in _changed(module.tree)
    )


def _changed(tree: ast.Module) -> set[str]:
    made = {
        target.id for node in tree.body for target in _targets(node) if isinstance(target, ast.Name)
    }
    changed: set[str] = set()
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    for function in functions:
        local = {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
        for node in ast.walk(function):
            changed |= {name for name in _changes(node) if name in made and name not in local}
    return changed


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _changes(node: ast.AST) -> Iterator[str]:
    """Return the names that a statement or call changes in place, or rebinds by `global`."""
    match node:
        case ast.Global():
            yield from node.names
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
            if method in CHANGING:
                yield name
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            yield name


def frames_to_trial(command: str, source: Path) -> int:
    """Return how many functions of flatout are running when a command starts its first trial."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text("import torch\n", encoding="utf-8")
        search = os.pathsep.join([str(source.parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", WALK, command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": search, "XDG_CACHE_HOME": f"{folder}/cache"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            text=True,
        )
    return int(done.stdout.split()[-1])


def table(source: Path) -> list[tuple[str, str]]:
    """Return the numbers of a source tree with their names."""
    modules = modules_of(source)
    users = importers(modules)
    functions = sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for module in modules.values()
        for node in ast.walk(module.tree)
    )
    total = sum(module.lines for module in modules.values())
    names = Counter(
        node.id
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name)
    )
    return [
        ("lines", f"{total:,}"),
        ("modules", f"{len(modules):,}"),
        ("median module, lines", f"{statistics.median(m.lines for m in modules.values()):.0f}"),
        ("functions per 1,000 lines", f"{1000 * functions / total:.0f}"),
        ("modules that one other imports", f"{sum(len(users[name]) == 1 for name in modules)}"),
        ("class names with several meanings", f"{len(repeated_classes(modules))}"),
        ("module globals that functions change", f"{len(mutable_globals(modules))}"),
        ("uses of Any", f"{names['Any']:,}"),
        *(
            (f"frames from `{command}` to its trial", f"{frames_to_trial(command, source)}")
            for command in ("measure", "tune")
        ),
    ]


def main(arguments: list[str]) -> None:
    """Print the table, then the lines of each folder and the longest modules."""
    source = Path(arguments[0]) if arguments else SOURCE
    for name, value in table(source):
        print(f"{value:>8}  {name}")
    modules = modules_of(source)
    print()
    for folder, lines in sorted(folder_lines(modules, source).items()):
        print(f"{lines:8,}  {folder or '.'}")
    print()
    for module in sorted(modules.values(), key=lambda module: -module.lines)[:10]:
        print(f"{module.lines:8,}  {module.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
