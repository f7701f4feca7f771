"""From what the user typed to a Workload, with refusals that name what was meant."""

import ast
import difflib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path

from flatout.agent.bootstrap import find_module
from flatout.records.errors import UserError, unknown
from flatout.records.trial import Workload

MODULE = "-m"
RUNNERS = ("uv", "poetry", "pdm")
"""Tools whose `run` starts what follows in the project's environment, where flatout is already."""
LAUNCHERS = {
    ("torchrun",): "torch.distributed.run",
    ("accelerate", "launch"): "accelerate.commands.launch",
}
"""Commands that start the ranks of a training, and the modules that they are."""
PYTHON = re.compile(r"(.*/)?python[\d.]*")
HARMLESS = ("-u", "-B", "-s")
"""Options of Python that are passed on: no training is slower or another one for them."""
SETTING = re.compile(r"[A-Za-z_]\w*=")


def parse_workload(target: str, arguments: Sequence[str]) -> Workload:
    """Return the workload: a script, `file.py:name` for a Task, or `-m` with a module first.

    What starts a script is taken as it is typed: `python train.py`, `uv run train.py`,
    `torchrun --nproc-per-node 2 train.py`, `accelerate launch train.py`, or the name of a command
    that is installed next to this Python.

    Raises:
        UserError: if there is no such script, module or Task, or it cannot be run.
    """
    options: list[str] = []
    target, *arguments = _unwrapped([target, *arguments], options)
    return replace(_workload(target, arguments), python_options=tuple(options))


def _workload(target: str, arguments: list[str]) -> Workload:
    if target == MODULE:
        return _module(arguments)
    path, colon, name = target.rpartition(":")
    # Here and below not Path's own, which raise for a name that is too long: a command in quotes.
    if colon and name.isidentifier() and not os.path.exists(target):  # noqa: PTH110
        return _task(Path(path), name, arguments)
    _check_script(Path(target))
    if target.startswith("-"):
        target = f"./{target}"  # Python takes a script called -c.py for its option -c
    return Workload(target=target, arguments=tuple(arguments), python=sys.executable)


def words_of(text: str) -> list[str]:
    """Return the words of a text, split as a shell does.

    Raises:
        UserError: if a quotation is not closed in it.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text!r} cannot be split into words: {error}") from None


def _unwrapped(words: list[str], options: list[str]) -> list[str]:
    """Return the words from the script, or `-m`, on: what they begin with is how it is started.

    Python's own options among them are added to `options`.
    """
    first, *rest = words
    if SETTING.match(first) and not os.path.exists(first):  # noqa: PTH110
        raise UserError(f"{first} sets a variable: put it before flatout, as before python")
    if first in RUNNERS and rest[:1] == ["run"]:
        return _unwrapped(
            _script_after(f"{first} run", rest[2:] if rest[1:2] == ["--"] else rest[1:]), options
        )
    if PYTHON.fullmatch(first):
        _check_same_python(first)
        while rest[:1] and rest[0] in HARMLESS:
            options.append(rest.pop(0))
        return _script_after(first, rest)
    for launcher, module in LAUNCHERS.items():
        if tuple(words[: len(launcher)]) == launcher:
            return [MODULE, module, *words[len(launcher) :]]
    installed = Path(sys.executable).parent / first
    is_installed = first == installed.name and os.path.isfile(installed)  # noqa: PTH113
    is_command = is_installed and not Path(first).exists()
    return [str(installed), *rest] if is_command else words


def _script_after(start: str, rest: list[str]) -> list[str]:
    """Return the words after a start such as `python`."""
    if not rest:
        raise UserError(f"{start} needs a script, as in: flatout measure {start} train.py")
    if rest[0].startswith("-") and rest[0] != MODULE:
        raise UserError(
            f"flatout starts the script itself and cannot pass {rest[0]} on to {start}: leave it "
            "out, or set the environment variable that does the same before flatout"
        )
    return rest


def _check_same_python(typed: str) -> None:
    """Refuse a path to a Python other than the one that flatout is installed for."""
    found = shutil.which(typed)
    ours = Path(sys.executable).parent
    if "/" in typed and (found is None or Path(os.path.abspath(found)).parent != ours):  # noqa: PTH100  links followed, all venvs are one Python
        raise UserError(
            f"flatout trains with the Python that it is installed for, {sys.executable}, not with "
            f"{typed}: install flatout there, or leave {typed} out"
        )


def _module(arguments: Sequence[str]) -> Workload:
    if not arguments:
        raise UserError("-m needs the name of a module, as in: flatout measure -m package.train")
    name, *rest = arguments
    top = name.partition(".")[0]
    # As `python -m`: the working directory comes first. Nothing of the user's is imported.
    here = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
    if here is None and find_module(top) is None:
        raise UserError(
            f"there is no module {name} here; start flatout in the folder that holds {top}, "
            "or give the script's path"
        )
    return Workload(target=f"{MODULE} {name}", arguments=tuple(rest), python=sys.executable)


def _task(path: Path, name: str, arguments: Sequence[str]) -> Workload:
    _check_script(path)
    if arguments:
        raise UserError(
            f"a Task takes no arguments, {' '.join(arguments)!r} was given; "
            f"set them in {path}, where {name} is made"
        )
    known = _top_level_names(path)
    if name not in known and "*" not in known:
        raise UserError(f"{path}: {unknown('Task', name, known)}")
    return Workload(target=f"{path}:{name}", python=sys.executable, is_task=True)


def _check_script(path: Path) -> None:
    if os.path.isdir(path):  # noqa: PTH112
        raise UserError(f"{path} is a folder, not a script{_instead(path)}")
    if not os.path.exists(path):  # noqa: PTH110
        if " " in path.name.strip():
            raise UserError(
                f"there is no script '{path}'; type its words without quotes around all"
            )
        raise UserError(f"there is no script {path}{_instead(path.parent, path.name)}")
    try:
        with path.open("rb") as stream:
            start = stream.readline(256)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    is_python = path.suffix in (".py", ".pyw") or (start.startswith(b"#!") and b"python" in start)
    if not is_python:
        raise UserError(
            f"{path} is not a Python script: its name does not end in .py and it does not start "
            f"with a #! line for python{_instead(path.parent, path.name)}"
        )


def _instead(folder: Path, wanted: str = "train.py") -> str:
    """Return the hint that names the nearest script in a folder; empty where there is none."""
    try:
        found = [item.name for item in folder.iterdir() if item.suffix == ".py" and item.is_file()]
    except OSError:
        found = []
    scripts = sorted(found)
    if not scripts:
        return f"; there is no .py file in {folder}" if os.path.isdir(folder) else ""  # noqa: PTH112
    nearest = difflib.get_close_matches(wanted, scripts, n=1, cutoff=0.0)[0]
    return f"; did you mean {folder / nearest}?"


def _top_level_names(path: Path) -> set[str]:
    """Return the names a module binds at its top; `*` stands for a star import."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise UserError(
            f"{path}, line {error.lineno}: {error.msg}; fix it until 'python {path}' starts"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:  # NUL bytes; thousands of levels
        raise UserError(f"{path} cannot be parsed: {error or 'it is nested too deep'}") from error
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.alias):
                names.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names
