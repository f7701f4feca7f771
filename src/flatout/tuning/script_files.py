"""The files that a workload is made of: a resumed tuning has to find them as they were.

Those that the command line names, and the modules that its scripts import, as far as Python finds
them outside the installed packages. Nothing is imported.
"""

import ast
import hashlib
import stat
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import flatout
from flatout.records.trial import Workload

INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages, which no one fixes between two tunings."""
MAX_BYTES = 1 << 20
"""A larger file on the command line is data or a checkpoint, not something written by hand."""
PYTHON = ("", ".py", ".pyw")
"""Endings of scripts; one that starts with a #! line may have none."""
DIGEST_BYTES = 16
MOST = 300
"""Files that are looked at, the nearest to the script first: the sources of a large library that is
used from its clone change seldom, and take half a minute to read."""


def digests_of(workload: Workload) -> dict[str, str]:
    """Return the digest of each file, by its path from the working folder."""
    return {
        shown(path, workload): hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest()
        for path, text in files_of(workload)
    }


def shown(path: Path, workload: Workload) -> str:
    """Return a file's path from the working folder; a whole one where it is elsewhere."""
    folder = workload.folder.resolve()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def script_folder(workload: Workload) -> Path:
    """Return the folder of the file that is run: lines in profiles are named from there."""
    return (find_script(workload) or workload.folder / workload.target).parent.resolve()


def files_of(workload: Workload) -> Iterator[tuple[Path, bytes]]:
    """Yield each file with its content, the nearest to the script first."""
    folder = workload.folder.resolve()
    named = [path for path in _named(workload, folder) if _find_text(path) is not None]
    # As Python does: a script's own folder comes first, with links followed.
    beside = (path.resolve().parent for path in named if path.suffix in PYTHON)
    roots = list(dict.fromkeys([*beside, folder, *_own_roots()]))
    waiting = deque([*named, *_started(workload, roots)])
    seen: set[Path] = set()
    count = 0
    while waiting and count < MOST:
        path = waiting.popleft()
        text = None if path in seen else _find_text(path)
        seen.add(path)
        if text is None:
            continue
        count += 1
        yield path, text
        if path.suffix in PYTHON:
            waiting.extend(_imported(path, text, roots))


def find_script(workload: Workload) -> Path | None:
    """Return the file of a workload's script, behind a launcher too; None where it has none."""
    folder = workload.folder.resolve()
    target = workload.target.rpartition(":")[0] if workload.is_task else workload.target
    roots = (folder, *_own_roots())
    started = [path for root in roots for path in reversed([*_started(workload, [root])])]
    launched = [folder / word for word in workload.arguments if started and word.endswith(".py")]
    files = [folder / target, *started, *launched]
    return next((path for path in files if _find_text(path)), None)


def source_of(workload: Workload) -> str:
    """Return the source of a workload's script; empty where it cannot be read."""
    path = find_script(workload)
    return (_find_text(path) or b"").decode("utf-8", "replace") if path else ""


def _named(workload: Workload, folder: Path) -> Iterator[Path]:
    """Yield what the words of the command line would be as files; most are none."""
    target = workload.target.rpartition(":")[0] if workload.is_task else workload.target
    for word in (target, *workload.arguments):
        yield folder / word
        yield folder / word.partition("=")[2]


def _started(workload: Workload, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield where the module may lie that `-m` starts."""
    name = workload.target.removeprefix("-m ")
    if name != workload.target:
        yield from _places(f"{name}.__main__", roots)


def _own_roots() -> Iterator[Path]:
    """Yield the folders in which Python looks for modules, but for the installed ones."""
    foreign = (Path(sysconfig.get_paths()["stdlib"]), Path(flatout.__file__).parent.parent)
    for root in (Path(entry).resolve() for entry in sys.path):
        is_foreign = any(root.is_relative_to(other.resolve()) for other in foreign)
        if not is_foreign and not INSTALLED.intersection(root.parts):
            yield root


def _find_text(path: Path) -> bytes | None:
    """Return what a file holds; None where there is none, or it is too large."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return None
        return path.read_bytes()
    except (OSError, ValueError):  # a word that is too long for a name, or a file of someone else
        return None


def _imported(path: Path, text: bytes, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield where the modules may lie that a script imports by name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text, filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # its trial says what is wrong with it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _places(alias.name, roots)
        elif isinstance(node, ast.ImportFrom):
            within = path.parents[node.level - 1 : node.level] if node.level else roots
            for alias in node.names:
                yield from _places(".".join(filter(None, (node.module, alias.name))), within)


def _places(name: str, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield where a module and the packages around it may lie."""
    parts = name.split(".")
    for root in roots:
        for count in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:count])
            yield place / "__init__.py"
            yield place.with_name(f"{parts[count - 1]}.py")
