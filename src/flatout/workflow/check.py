"""Check the source of trainings: find the files, ask the rules, write the fixes."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from flatout.analysis.source.script import NotAnalysableError
from flatout.hardware.limits import usable_cores
from flatout.launch.trial_process import scratch_root
from flatout.records import input_files
from flatout.records.errors import UserError
from flatout.records.files import module_command, replace_text, rewrite, unified_diff
from flatout.records.finding import CheckedFile, SourceCheck
from flatout.records.json_records import from_plain
from flatout.rules import source
from flatout.workflow.check_worker import (
    ABOUT_TRAINING,
    NOTHING,
    decode,
    not_analysable,
    read_bytes,
)

MAX_S = 60.0
"""Of wall time for one file, whose process gives up on its own after 10 s of CPU time."""
FILES_A_WORKER = 16
"""Fewer are checked sooner by one process than by two that have to start."""
MOST_WORKERS = 8
MAX_SETTINGS_BYTES = 1 << 17
"""Of a pyproject.toml: tomllib takes quadratic time for long dotted keys."""
MOST_REMEMBERED = 50_000
"""Files in the cache; most have no findings and take 100 bytes."""
NOTEBOOK = "a notebook; jupyter nbconvert --to script writes it as Python"
LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Which rules speak, as the command line and `pyproject.toml` say."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    data: bytes = b""
    not_analysable: str = ""
    is_named: bool = False
    key: str = ""


def check(paths: Sequence[Path], codes: Codes | None = None) -> SourceCheck:
    """Return what the rules find in files, and in the Python files below folders.

    Nothing of what is read is imported or run.

    Raises:
        UserError: if a path does not exist or a code is unknown.
    """
    written, codes = _settings(paths), codes or Codes()
    wanted = source.selected(codes.select or written.select, (*codes.ignore, *written.ignore))
    files = [_read(path, is_named=is_named) for path, is_named in _python_files(paths)]
    answers = _answers(files)
    return SourceCheck(files=tuple(_checked(file, answers, wanted) for file in files))


def diff(found: SourceCheck) -> str:
    """Return the fixes of all findings, safe and suggested, as a unified diff."""
    return "".join(
        unified_diff(Path(each.path), text.encode(encoding), new.encode(encoding))
        for each, text, encoding, new, _made in _fixed(found, suggested=True)
    )


def fix(found: SourceCheck, *, suggested: bool) -> SourceCheck:
    """Write the fixes into the files, with `suggested` also those that may change results.

    Returns what is left.

    Raises:
        UserError: if a file cannot be written, or was changed meanwhile.
    """
    made = 0
    left = {each.path: each for each in found.files}
    for each, text, encoding, new, count in _fixed(found, suggested=suggested):
        path = Path(each.path)
        try:
            rewrite(path, text.encode(encoding), new.encode(encoding))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error
        wanted = {finding.code for finding in each.findings}
        findings = tuple(f for f in source.check_text(new)[0] if f.code in wanted)
        made += count
        left[each.path] = replace(each, findings=findings)
    return SourceCheck(files=tuple(left.values()), fixed=made)


def _fixed(
    found: SourceCheck, *, suggested: bool
) -> Iterator[tuple[CheckedFile, str, str, str, int]]:
    """Yield the files that fixes change: text, encoding, new text, number of fixes."""
    for each in found.files:
        codes = {f.code for f in each.findings if f.fix and (suggested or f.fix.is_safe)}
        # A link in a folder may lead out of it.
        if not codes or (Path(each.path).is_symlink() and not each.is_named):
            continue
        try:
            data = read_bytes(Path(each.path))
            text, encoding = decode(data)
            if text.encode(encoding) != data:
                continue  # an encoding with several spellings of a character: better left alone
            new, made = source.fixed_text(text, codes, suggested=suggested)
        except NotAnalysableError:
            continue  # changed since it was checked
        if new != text:
            yield each, text, encoding, new, made


# Files


def _python_files(paths: Sequence[Path]) -> list[tuple[Path, bool]]:
    """Return the files to check, each once, with whether it was named itself."""
    found: dict[Path, bool] = {}
    for path in paths:
        if not os.path.lexists(path):
            raise UserError(f"there is no {path}; give Python files or folders")
        if path.is_dir():
            found.update(dict.fromkeys(_below(path), False) | found)
        else:
            found[path] = True
    return sorted(found.items())


def _below(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder; links to folders are not followed."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in LEFT_OUT
            and not name.startswith(".")
            and not os.path.lexists(os.path.join(here, name, "pyvenv.cfg"))  # noqa: PTH118  fast
        )
        yield from (Path(here, name) for name in files if name.endswith((".py", ".pyw")))


def _read(path: Path, *, is_named: bool) -> _File:
    if path.suffix == ".ipynb":  # its JSON may parse as Python, without one statement of its cells
        return _File(path, not_analysable=NOTEBOOK, is_named=is_named)
    try:
        data = read_bytes(path)
    except NotAnalysableError as error:
        return _File(path, not_analysable=str(error), is_named=is_named)
    return _File(path, data, is_named=is_named, key=hashlib.sha256(data).hexdigest())


def _settings(paths: Sequence[Path]) -> Codes:
    """Return `[tool.flatout.check]` of the nearest pyproject.toml at or above the first path."""
    start = paths[0].absolute() if paths else Path.cwd()
    found = (folder / "pyproject.toml" for folder in (start, *start.parents))
    path = next(filter(Path.is_file, found), None)
    if path is None:
        return Codes()
    try:
        written = input_files.parse_toml(input_files.read_bytes(path, MAX_SETTINGS_BYTES).decode())
        for name in ("tool", "flatout", "check"):
            written = written.get(name, {})
        settings = {key: written.get(key, []) for key in ("select", "ignore")}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    except AttributeError:
        raise UserError(f"{path}: [tool.flatout.check] is no table") from None
    for key, value in settings.items():
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise UserError(
                f'{path}: {key} in [tool.flatout.check] is a list such as ["DL02", "MEM"]'
            )
    return Codes(select=tuple(settings["select"]), ignore=tuple(settings["ignore"]))


def _checked(
    file: _File, answers: Mapping[str, CheckedFile], wanted: Collection[str]
) -> CheckedFile:
    answer = answers[file.key]
    return replace(
        answer,
        path=str(file.path),
        findings=tuple(finding for finding in answer.findings if finding.code in wanted),
        not_analysable=file.not_analysable or answer.not_analysable,
        is_named=file.is_named,
    )


# Answers, remembered or asked for


def _answers(files: Sequence[_File]) -> dict[str, CheckedFile]:
    """Return what was found in each content, by its key and without a path."""
    place = _cache_file()
    known = _remembered(place)
    answers: dict[str, CheckedFile] = {}
    unknown: dict[str, Path] = {}
    for file in files:
        if not any(word in file.data for word in ABOUT_TRAINING):
            answers[file.key] = CheckedFile(path="")
        elif (remembered := _recalled(known.get(file.key))) is not None:
            answers[file.key] = remembered
        else:
            unknown[file.key] = file.path
    if unknown:
        asked = _ask(unknown)
        answers.update({key: _answer(plain) for key, plain in asked.items()})
        if place is not None:
            _remember(place, {**known, **asked})
    return answers


def _answer(plain: Mapping[str, Any]) -> CheckedFile:
    return from_plain(CheckedFile, {"path": "", **plain})


def _recalled(plain: Any) -> CheckedFile | None:
    """Return what `_remember` wrote of a content; None where nothing is known, or it is damaged."""
    with contextlib.suppress(ValueError, AttributeError):
        if plain.keys() == NOTHING.keys():
            return _answer(plain)
    return None


def _cache_file() -> Path | None:
    """Return the file of this version of the rules; None where nothing can be kept."""
    try:
        folder = scratch_root() / "check"
        folder.mkdir(mode=0o700, exist_ok=True)
    except (OSError, UserError):
        return None
    return folder / f"{source.version()}.json"


def _remembered(place: Path | None) -> dict[str, Any]:
    try:
        known = input_files.read_json(place, input_files.MAX_OWN_BYTES) if place else {}
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(place: Path, answers: Mapping[str, Any]) -> None:
    latest = dict(list(answers.items())[-MOST_REMEMBERED:])
    with contextlib.suppress(OSError):
        replace_text(place, json.dumps(latest, separators=(",", ":")))
        for old in place.parent.glob("*.json"):
            if old != place:
                old.unlink()


def _ask(paths: Mapping[str, Path]) -> dict[str, Mapping[str, Any]]:
    """Return what processes of their own find in files, by key."""
    count = min(usable_cores(), MOST_WORKERS, -(-len(paths) // FILES_A_WORKER))
    items = list(paths.items())
    with ThreadPoolExecutor(count) as pool:
        parts = pool.map(_ask_in_turn, (items[first::count] for first in range(count)))
        return dict(chain.from_iterable(parts))


def _ask_in_turn(items: Sequence[tuple[str, Path]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return what a process finds in each file; where one ends it, the next has another one."""
    worker: subprocess.Popen[bytes] | None = None
    answers: list[tuple[str, Mapping[str, Any]]] = []
    for key, path in items:
        worker = worker or _start()
        answer = _asked(worker, path)
        if answer is None:
            _end(worker)
            worker = None
            answer = not_analysable(f"the parser ended, or took more than {MAX_S:.0f} s")
        answers.append((key, answer))
    if worker is not None:
        _end(worker)
    return answers


def _start() -> "subprocess.Popen[bytes]":
    command = module_command(sys.executable, "flatout.workflow.check_worker")
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def _end(worker: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):  # what it has not read is lost with it
        worker.communicate()


def _asked(worker: "subprocess.Popen[bytes]", path: Path) -> Mapping[str, Any] | None:
    """Return what a worker says about a file, None where it ended instead."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    limit = threading.Timer(MAX_S, worker.kill)
    limit.start()
    try:
        worker.stdin.write(json.dumps(str(path)).encode() + b"\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None
    except (OSError, ValueError):
        return None
    finally:
        limit.cancel()
