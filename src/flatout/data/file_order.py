"""The order in which files lie on storage: read off it, and made by a copy in shuffled order.

A file lies where there is room when it is written, near those written just before it, and its inode
number follows theirs. So `copy_shuffled` writes files one after the other in the order of a
permutation, all into one folder, and then gives them their names, which moves no bytes.
"""

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.format import HEADER, STAGING
from flatout.data.sampler import Places, permutation, unevenness
from flatout.data.sources.folder import files_below
from flatout.data.sources.source import fingerprint_of, stamp_of
from flatout.data.staging import PLAN, write_whole
from flatout.records.errors import UserError
from flatout.records.input_files import read_json
from flatout.records.live import Progress, Tell
from flatout.records.messages import words
from flatout.records.units import format_bytes, format_rate

COPIED = "copied.json"
"""How many files are on the disk for good, of a copy that is not finished."""
SYNC_FILES = 2_000
"""Copied between two times that all is flushed: what is copied again after a power cut at most."""
NEIGHBOURS = 64
"""Files side by side that are looked at together: a usual batch."""


def lying_order(paths: Sequence[str]) -> Places:
    """Return the numbers of files in the order in which they lie, as far as inode numbers tell.

    A folder's own entries tell the numbers: no file is opened or asked.

    Raises:
        OSError: if a file or its folder is gone.
    """
    folders: dict[str, tuple[int, dict[str, int]]] = {}
    keys = np.empty((2, len(paths)), dtype=np.uint64)
    for number, path in enumerate(paths):
        folder, _, name = path.rpartition(os.sep)
        if folder not in folders:
            folders[folder] = _inodes(Path(folder or os.sep))
        device, inodes = folders[folder]
        keys[:, number] = inodes.get(name) or Path(path).stat().st_ino, device
    order: Places = np.lexsort(keys)
    return order


def _inodes(folder: Path) -> tuple[int, dict[str, int]]:
    """Return device and inode numbers of a folder's files; a link's file is elsewhere."""
    with os.scandir(folder) as entries:
        inodes = {entry.name: entry.inode() for entry in entries if not entry.is_symlink()}
    return folder.stat().st_dev, inodes


def folder_classes(paths: Sequence[str]) -> np.ndarray[Any, Any] | None:
    """Return of each file the number of its folder; None where all are in one."""
    folders = [path.rpartition(os.sep)[0] for path in paths]
    known = np.unique(folders, return_inverse=True)[1].reshape(-1)
    return known if known.any() else None


def uneven_on_storage(root: Path, names: Sequence[str]) -> float | None:
    """Return how unevenly neighbours on storage mix the folders they are in: 1 is a shuffle.

    None where there is one folder only.
    """
    paths = [f"{root}{os.sep}{name}" for name in names]
    classes = folder_classes(paths)
    return None if classes is None else unevenness(classes[lying_order(paths)], NEIGHBOURS)


def copy_shuffled(source: Path, folder: Path, *, seed: int, tell: Tell) -> list[str]:
    """Copy all files of a folder in shuffled order, and return their names in that order.

    Goes on where a copy of the same source with the same seed was ended; the destination is held by
    the caller.

    Raises:
        UserError: if there is nothing to copy, no room, or another pack in the destination.
    """
    names = _names_in(source)
    ordered = [names[number] for number in permutation(len(names), seed=seed, epoch=0).tolist()]
    stamps = fingerprint_of(f"{name} {stamp_of(source / name)}" for name in names)
    begun = _begin(folder, {"files": len(names), "fingerprint": stamps, "seed": seed})
    _check_room([source / name for name in ordered[begun:]], folder)
    started = time.monotonic()
    for number, name in enumerate(ordered[begun:], start=begun):
        _copy(source / name, folder / STAGING / f"{number:09d}", folder / name)
        if (number + 1) % SYNC_FILES == 0:
            _note(folder, number + 1)
        tell(_progress(number + 1 - begun, len(ordered) - begun, time.monotonic() - started))
    os.sync()
    (folder / STAGING / PLAN).unlink()  # what is left there goes with whoever holds the folder
    return ordered


def _names_in(source: Path) -> list[str]:
    def note(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}")

    names = sorted(os.path.relpath(path, source) for path in files_below(source, "", note))
    if not names:
        raise UserError(f"{source} holds no files; there is nothing to copy")
    if any(name.startswith(f"{STAGING}{os.sep}") for name in names):
        raise UserError(f"{source} holds an unfinished pack ({STAGING}); finish or remove it first")
    return names


def _begin(folder: Path, plan: dict[str, Any]) -> int:
    """Write the plan down, or return how far a copy with the same one came."""
    path = folder / STAGING / PLAN
    if (folder / HEADER).is_file():
        raise UserError(f"{folder} is not empty; choose a folder that does not exist yet")
    if not path.is_file():
        (folder / STAGING / COPIED).unlink(missing_ok=True)  # of a copy that was killed at its end
        write_whole(path, json.dumps(plan).encode())
        return 0
    before: Any = None
    copied = 0
    try:
        before = read_json(path)
        if (folder / STAGING / COPIED).is_file():
            copied = int(read_json(folder / STAGING / COPIED)["files"])
    except (OSError, ValueError, KeyError, TypeError):
        before = None
    if before != plan or not 0 <= copied <= plan["files"]:
        raise UserError(
            f"{folder} holds the beginning of another pack; give the options and the source of "
            "then, or remove the folder"
        )
    return copied


def _note(folder: Path, count: int) -> None:
    os.sync()  # not file by file: a disk would take a seek for each
    write_whole(folder / STAGING / COPIED, json.dumps({"files": count}).encode())


def _check_room(paths: Sequence[Path], folder: Path) -> None:
    try:
        needed = sum(path.stat().st_size for path in paths)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{format_bytes(needed)} are needed and {format_bytes(free)} are free in {folder}; "
            "choose another disk"
        )


def _copy(path: Path, draft: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, draft)
        draft.replace(target)
    except OSError as error:
        raise UserError(f"{path} cannot be copied to {target}: {error.strerror}") from None


def _progress(done: int, count: int, elapsed_s: float) -> Progress:
    rate = done / elapsed_s if elapsed_s else 0.0
    return Progress(
        trying=words("packing.copying", n=str(done), of=str(count), rate=format_rate(rate)),
        done_share=done / count,
        elapsed_s=elapsed_s,
        left_s=(count - done) / rate if rate else 0.0,
    )
