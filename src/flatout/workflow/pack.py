"""The command `pack`: a source into a packed store, and the proof that both are equal."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flatout.data import file_order, staging, worker_pool
from flatout.data import verify as verifying
from flatout.data import writer as packing
from flatout.data.format import HEADER, SKIPPED, STAGING, Header
from flatout.data.sources import open_source
from flatout.data.sources.source import Source
from flatout.data.verify import MAX_PROBLEMS, Verification
from flatout.data.writer import PackOptions, Tell
from flatout.records.errors import UserError
from flatout.records.input_files import parse_json

SCHEMA = "flatout.pack/1"
CHECK_SCHEMA = "flatout.pack_check/1"
FILES_SCHEMA = "flatout.pack_files/1"
MAX_NAMED = 5
"""Skipped samples, and classes, that a report names; files of the store have them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """A finished store."""

    folder: str
    header: Header
    seconds: float
    was_packed: bool
    """Whether it was complete before."""
    ignored: int = 0
    """Files of the source that are of no kind that is packed."""
    skipped: tuple[str, ...] = ()
    """The first samples that were left out, each with the reason."""
    verification: Verification | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a plain JSON mapping."""
        return {
            "schema": SCHEMA,
            **_stored(self.folder, self.header),
            "source": dict(self.header.source),
            "encoding": asdict(self.header.encoding),
            "is_lossless": self.header.is_lossless,
            "order": self.header.order,
            "seed": self.header.seed,
            "classes": len(self.header.classes),
            "classes_first": list(self.header.classes[:MAX_NAMED]),
            "skipped": self.header.skipped,
            "skipped_first": list(self.skipped),
            "ignored": self.ignored,
            "was_packed": self.was_packed,
            "seconds": self.seconds,
            "verification": asdict(self.verification) if self.verification else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A store that was read whole and compared with its own checksums."""

    folder: str
    header: Header
    seconds: float
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a plain JSON mapping."""
        return {
            "schema": CHECK_SCHEMA,
            **_stored(self.folder, self.header),
            "is_sound": not self.problems,
            "num_problems": len(self.problems),
            "problems": list(self.problems[:MAX_PROBLEMS]),
            "seconds": self.seconds,
        }


def _stored(folder: str, header: Header) -> dict[str, Any]:
    return {
        "folder": folder,
        "samples": header.samples,
        "bytes": sum(shard.bytes for shard in header.shards),
        "file_shards": len(header.shards),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffledFiles:
    """A folder of files that was copied in shuffled order, and what was counted of it."""

    source: str
    folder: str
    files: int
    bytes: int
    seed: int
    seconds: float
    uneven: float | None
    """How unevenly neighbours on storage mix the folders they are in: 1 is a shuffle. None where
    there is one folder."""
    uneven_before: float | None
    """The same of the source."""

    def to_json(self) -> dict[str, Any]:
        """Return a plain JSON mapping."""
        return {"schema": FILES_SCHEMA, **asdict(self)}


def shuffle_files(target: str, folder: Path, *, seed: int, tell: Tell) -> ShuffledFiles:
    """Copy a folder of files as they are, in shuffled order, or go on with an unfinished copy.

    Raises:
        UserError: for whatever keeps the files from being copied; what is done is kept.
    """
    started = time.monotonic()
    source = Path(target).expanduser()
    if not source.is_dir():
        raise UserError(f"{target} is no folder; --files copies the files of one")
    _check_apart(target, folder)
    staging.check_empty(folder)
    source = source.resolve()
    with staging.locked(folder):
        names = file_order.copy_shuffled(source, folder, seed=seed, tell=tell)
    return ShuffledFiles(
        source=target,
        folder=str(folder),
        files=len(names),
        bytes=sum((folder / name).stat().st_size for name in names),
        seed=seed,
        seconds=time.monotonic() - started,
        uneven=file_order.uneven_on_storage(folder.resolve(), names),
        uneven_before=file_order.uneven_on_storage(source, names),
    )


def check(folder: Path, *, workers: int, tell: Tell) -> Checked:
    """Read all of a store and compare it with its own checksums; its source is not needed.

    Raises:
        UserError: if there is no complete store, or a part of it cannot be read.
    """
    started = time.monotonic()
    with worker_pool.failures_worded():
        header, problems = verifying.check(folder, workers=workers, tell=tell)
    seconds = time.monotonic() - started
    return Checked(folder=str(folder), header=header, seconds=seconds, problems=tuple(problems))


def pack(
    target: str, folder: Path, options: PackOptions, tell: Tell, *, verify: bool = False
) -> PackResult:
    """Pack a source into a folder, or go on with what an earlier call began there.

    With `verify` every sample is compared with the source afterwards.

    Raises:
        UserError: for whatever keeps the source from being packed; what is done is kept.
    """
    started = time.monotonic()
    _check_apart(target, folder)
    staging.check_empty(folder)

    def opened() -> Source:
        return open_source(target, work=folder / STAGING, on_bad=options.on_bad)

    with worker_pool.failures_worded(), staging.locked(folder):
        staging.clear(folder)  # what a kill between the header and the end left
        was_packed = (folder / HEADER).is_file()
        source = opened()
        header = packing.pack_held(source, folder, options, tell)
        seconds = time.monotonic() - started
        found = None
        if verify:
            if not was_packed:
                staging.clear(folder)  # what was made of the source to pack it proves nothing
                source = opened()
            found = verifying.verify(source, folder, workers=options.workers, tell=tell)
    return PackResult(
        folder=str(folder),
        header=header,
        seconds=seconds,
        was_packed=was_packed,
        ignored=source.contents.ignored,
        skipped=_first_skipped(folder),
        verification=found,
    )


def _check_apart(target: str, folder: Path) -> None:
    """Refuse a store inside its own source: the next look at the source would find it there."""
    source = Path(target).expanduser()
    if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{folder} is in {target}, which is packed; choose a folder outside it")


def _first_skipped(folder: Path) -> tuple[str, ...]:
    try:
        with (folder / SKIPPED).open(encoding="utf-8") as file:
            rows = [parse_json(line) for _, line in zip(range(MAX_NAMED), file, strict=False)]
        return tuple(f"{row['name']}: {row['reason']}" for row in rows)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder / SKIPPED} cannot be read: {error}") from None
