"""What an unfinished pack keeps: its plan, and one part for every file shard that is whole.

A file shard is written under another name, flushed to the disk and renamed; only then its part is
written the same way. So after a kill at any moment each shard is whole and has its part, or is
made again; and each is a function of the plan alone, so the result is the same, byte by byte.
"""

import contextlib
import fcntl
import io
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.format import ENTRY, HEADER, STAGING, Encoding, Skipped
from flatout.launch.folder_lock import spare_file
from flatout.launch.trial_process import scratch_root
from flatout.records.errors import UserError
from flatout.records.input_files import MAX_NPZ_BYTES, check_unpacked_size, parse_json, read_json
from flatout.records.json_records import from_plain

PLAN = "plan.json"
LOCK = "lock"
DRAFT = ".draft"
LOCK_WAIT_S = 5.0
"""Workers of a killed pack hold its lock for the moment until they have noticed."""
LOCK_PAUSE_S = 0.05
"""Between two tries."""
Entries = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Everything that decides what is written."""

    kind: str
    fingerprint: str
    samples: int
    per_shard: int
    """Samples of the source in each file shard."""
    encoding: Encoding
    seed: int
    is_shuffled: bool
    on_bad: str

    @property
    def shards(self) -> int:
        """Number of file shards."""
        return -(-self.samples // self.per_shard)

    def span(self, number: int) -> range:
        """Return the places in stored order that belong to a file shard."""
        first = number * self.per_shard
        return range(first, min(first + self.per_shard, self.samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedPart:
    """What one file shard holds."""

    entries: Entries
    names: Sequence[str]
    skipped: Sequence[Skipped]
    bytes: int
    shapes: Sequence[tuple[int, ...] | None]
    """Of each field, where all samples of the shard agree."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a destination: two packs never write into the same folder.

    Who holds it also tidies it, before it is let go: of a finished store nothing is left that only
    a pack needs, and of a pack that never came to its plan nothing at all.

    Raises:
        UserError: if another process holds it, or it cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    descriptor = _acquired(folder)
    try:
        yield
    finally:
        try:
            _tidy(folder, made)
        finally:
            os.close(descriptor)


def _acquired(folder: Path) -> int:
    """Return the lock's descriptor, once no one else has it."""
    give_up = time.monotonic() + LOCK_WAIT_S
    while time.monotonic() < give_up:
        descriptor = _opened(folder)
        if descriptor is not None and _is_ours(descriptor, folder):
            return descriptor
        if descriptor is not None:
            os.close(descriptor)
        time.sleep(LOCK_PAUSE_S)
    raise UserError(f"another process is packing into {folder}; wait for it to end")


def _opened(folder: Path) -> int | None:
    """Return a descriptor of the lock's file; None where its folder was removed just now."""
    staging = folder / STAGING
    try:
        staging.mkdir(parents=True, exist_ok=True)
        return os.open(staging / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None


def _is_ours(descriptor: int, folder: Path) -> bool:
    """Lock, and say whether the file is still the one that others will find there."""
    file = os.fstat(descriptor)
    try:
        _lock(descriptor, file)
        return os.path.samestat(file, (folder / STAGING / LOCK).stat())
    except (BlockingIOError, PermissionError, FileNotFoundError):  # held, or removed just now
        return False
    except OSError as error:
        raise UserError(f"{folder} cannot be locked: {error.strerror}") from None


def _lock(descriptor: int, file: os.stat_result) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise
    except OSError:
        # Some file systems have no locks, as Lustre that is mounted without. The descriptor
        # becomes that of a file of this host instead, which keeps apart at least its own packs.
        spare = os.open(spare_file(file, scratch_root()), os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(spare, descriptor, inheritable=False)
        os.close(spare)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _tidy(folder: Path, made: Sequence[Path]) -> None:
    """Leave a plan and what belongs to it, a finished store, or nothing.

    `made` did not exist before, the innermost first.
    """
    clear(folder)
    if (folder / STAGING / PLAN).is_file():
        return
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    with contextlib.suppress(OSError):  # a folder in which something is stays
        for path in made:
            path.rmdir()


def check_empty(folder: Path) -> None:
    """Make sure that a destination holds nothing but an unfinished pack."""
    is_ours = (folder / STAGING).is_dir() or (folder / HEADER).is_file()
    if folder.is_dir() and not is_ours and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose a folder that does not exist yet")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose a folder that does not exist yet")


def agree(folder: Path, plan: PackPlan) -> PackPlan:
    """Return the plan that an earlier start left here, or keep this one."""
    path = folder / STAGING / PLAN
    remove_drafts(folder)
    if not path.is_file():
        write_whole(path, (json.dumps(asdict(plan), sort_keys=True) + "\n").encode())
        return plan
    try:
        plain = read_json(path)
        before = from_plain(PackPlan, plain)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); remove {folder} and pack again") from None
    # How long the shards are was estimated; the first estimate is.
    changed = [
        name
        for name in ("kind", "fingerprint", "samples", "encoding", "seed", "is_shuffled", "on_bad")
        if getattr(before, name) != getattr(plan, name)
    ]
    if changed:
        raise UserError(
            f"{folder} holds the beginning of another pack ({', '.join(changed)} differ); give the "
            "options and the source of then, or remove the folder"
        )
    return before


def remove_drafts(folder: Path) -> None:
    """Remove what was being written when a pack was ended."""
    drafts = [*folder.glob(f"*{DRAFT}*"), *(folder / STAGING).glob(f"*{DRAFT}*")]
    for draft in (*drafts, *folder.glob(f".{HEADER}.*")):  # the header's is `replace_text`'s
        with contextlib.suppress(OSError):
            draft.unlink()


def part_path(folder: Path, number: int) -> Path:
    """Return where the part of a file shard is."""
    return folder / STAGING / f"part-{number:05d}.npz"


def missing_shards(folder: Path, plan: PackPlan) -> list[int]:
    """Return the file shards that are still to be written."""
    return [n for n in range(plan.shards) if not part_path(folder, n).is_file()]


def write_part(folder: Path, number: int, part: FinishedPart) -> None:
    """Write down that a file shard is whole, and what it holds."""
    about = {
        "names": list(part.names),
        "skipped": [asdict(item) for item in part.skipped],
        "bytes": part.bytes,
        "shapes": list(part.shapes),
    }
    stream = io.BytesIO()
    text = np.frombuffer(json.dumps(about).encode("utf-8"), np.uint8)
    np.savez(stream, entries=part.entries, about=text)
    write_whole(part_path(folder, number), stream.getvalue())


def read_part(folder: Path, number: int) -> FinishedPart:
    """Return what a file shard holds."""
    path = part_path(folder, number)
    try:
        check_unpacked_size(path, MAX_NPZ_BYTES)
        with np.load(path, allow_pickle=False) as file:
            about = parse_json(file["about"].tobytes())
            entries = file["entries"].astype(ENTRY)
        return FinishedPart(
            entries=entries,
            names=about["names"],
            skipped=[Skipped(**item) for item in about["skipped"]],
            bytes=about["bytes"],
            shapes=[None if shape is None else tuple(shape) for shape in about["shapes"]],
        )
    except Exception as error:  # noqa: BLE001  zipfile, zlib and numpy raise nearly every class
        raise UserError(
            f"{path} cannot be read: {error}; remove it and run the same command again"
        ) from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that after a power cut it is there whole, or not at all."""
    draft = path.with_name(f"{path.name}{DRAFT}{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            sync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def sync(descriptor: int) -> None:
    """Flush a file to the disk."""
    os.fsync(descriptor)


def clear(folder: Path) -> None:
    """Remove what only an unfinished pack needs, once the header says that it is finished.

    The lock stays: it holds the folder until whoever has it lets go.
    """
    if not (folder / HEADER).is_file():
        return
    for path in (folder / STAGING).glob("*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            with contextlib.suppress(OSError):
                path.unlink()
