"""Parquet and Arrow files, and folders that Hugging Face `datasets` saved. Needs pyarrow.

Parquet cannot be read in random order, so it is written out as Arrow once, alongside the pack that
is being made, and removed with the rest of what an unfinished pack keeps. What was written out is
used again only for the very file it was made of.
"""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data import pictures, values
from flatout.data.format import BadSample, Field
from flatout.data.sources.source import (
    Contents,
    files_of_kind,
    fingerprint_of,
    label_in,
    need_samples,
    read_file,
    stamp_of,
)
from flatout.data.staging import sync
from flatout.data.worker_pool import FULL
from flatout.records.errors import UserError
from flatout.records.input_files import parse_json, read_json
from flatout.records.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Rows of Arrow files, mapped by every process for itself."""

    contents: Contents
    paths: tuple[str, ...]
    starts: tuple[int, ...]
    """First row of each record batch, and the number of all rows."""
    stamps: tuple[str, ...]
    """Size and time of writing of each file that was given."""

    def __len__(self) -> int:
        return self.starts[-1]

    def name(self, index: int) -> str:
        """Return the row."""
        return f"row {index}"

    def read(self, index: int) -> tuple[Any, ...]:
        """Return one row, images as their files' bytes."""
        place = int(np.searchsorted(self.starts, index, side="right")) - 1
        batch = _batches(self.paths, self.stamps)[place]
        row = index - self.starts[place]
        return tuple(
            _value(field, _cell(batch, field.name, row), self.contents.root)
            for field in self.contents.fields
        )

    def fingerprint(self) -> str:
        """Return a hash of the schema, the numbers of rows, and when each file was written."""
        schema = str(_batches(self.paths, self.stamps)[0].schema.remove_metadata())
        return fingerprint_of([schema, *self.stamps, *map(str, self.starts)])


def open_columns(path: Path, *, work: Path) -> Columns:
    """Return the rows of a file, or of all such files in a folder.

    Raises:
        UserError: if pyarrow is missing, a file is damaged, or a column cannot be stored.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise UserError("Arrow and Parquet need pyarrow: pip install 'flatout[pack]'") from None
    try:
        given = _given(path)
        stamps = tuple(map(stamp_of, given))
        files = tuple(map(str, _as_arrow(given, work)))
        batches = _batches(files, stamps)
    except (pa.ArrowException, OSError) as error:
        raise UserError(_why_not(path, error)) from None
    sizes = [batch.num_rows for batch in batches]
    need_samples(sum(sizes), str(path))
    _check_columns(batches, path)
    root = str((path if path.is_dir() else path.parent).resolve())
    fields = tuple(_field(batches, name, path, root) for name in batches[0].schema.names)
    label = label_in(fields)
    contents = Contents(
        kind="columns",
        fields=fields,
        structure="dict",
        root=root,
        label=label,
        classes=_class_names(path, label, batches[0].schema),
    )
    starts = tuple(int(n) for n in np.cumsum([0, *sizes]))
    return Columns(contents=contents, paths=files, starts=starts, stamps=stamps)


def _why_not(path: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"the disk is full ({error.strerror}) where {path} is written out as Arrow; make room "
            "and run the same command again"
        )
    return f"{path} cannot be read: {error}"


def _given(path: Path) -> list[Path]:
    """Return the files, all of one kind."""
    if path.is_file():
        found = [path]
    else:
        found = files_of_kind(path, (".arrow", ".parquet"))
        listed = path / "state.json"
        if listed.is_file():  # what Hugging Face saved names its files, in order
            found = [path / name for name in _listed(listed)]
            if any(item.parent != path for item in found):
                raise UserError(f"{listed} names files outside {path}; save the data set again")
    kinds = {item.suffix.lower() for item in found}
    if len(kinds) > 1:
        raise UserError(f"{path} holds Arrow and Parquet files; pack one kind at a time")
    return [item.resolve() for item in found]


def _listed(path: Path) -> list[str]:
    try:
        state = read_json(path)
        return [str(item["filename"]) for item in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); save the data set again") from None


def _as_arrow(given: Sequence[Path], work: Path) -> list[Path]:
    """Return the Arrow files, Parquet written out as such."""
    if not given or given[0].suffix.lower() == ".arrow":
        return list(given)
    targets = [work / f"{n:05d}-{_identity(item)}.arrow" for n, item in enumerate(given)]
    left = [pair for pair in zip(given, targets, strict=True) if not pair[1].is_file()]
    if left:
        _batches.cache_clear()  # a file that is still mapped keeps its room when it is removed
        work.mkdir(parents=True, exist_ok=True)
        for old in set(work.glob("*.arrow")) - set(targets):
            old.unlink()
        _check_room([parquet for parquet, _target in left], work)
    for parquet, target in left:
        _write_arrow(parquet, target)
    return [target.resolve() for target in targets]


def _identity(parquet: Path) -> str:
    """Return what is another one for another file, and for one that was written again."""
    return fingerprint_of([str(parquet), stamp_of(parquet)])


def _check_room(parquets: Sequence[Path], work: Path) -> None:
    import pyarrow.parquet as pq

    needed = 0
    for parquet in parquets:
        about = pq.read_metadata(parquet)
        needed += sum(about.row_group(n).total_byte_size for n in range(about.num_row_groups))
    free = shutil.disk_usage(work).free
    if needed > free:
        raise UserError(
            f"Parquet is written out as Arrow first, which takes about {format_bytes(needed)}; "
            f"{format_bytes(free)} are free in {work}: choose another disk for the store"
        )


def _write_arrow(parquet: Path, target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    draft = target.with_suffix(".draft")
    identity = _identity(parquet)
    try:
        with pq.ParquetFile(parquet) as file, draft.open("wb") as sink:
            with pa.ipc.new_file(sink, file.schema_arrow) as writer:
                for batch in file.iter_batches():
                    writer.write_batch(batch)
            sink.flush()
            sync(sink.fileno())
        if _identity(parquet) != identity:
            raise UserError(f"{parquet} was written to while it was read; pack it when finished")
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


@lru_cache(maxsize=1)
def _batches(paths: tuple[str, ...], stamps: tuple[str, ...]) -> Sequence[Any]:
    """Return the rows of all files, mapped; the stamps tell a file from what it was before."""
    return [batch for path in paths for batch in _mapped(path) if batch.num_rows]


def _mapped(path: str) -> Iterator[Any]:
    import pyarrow as pa

    source = pa.memory_map(path)
    try:
        reader = pa.ipc.open_file(source)
    except pa.ArrowInvalid:  # a stream, which is what Hugging Face writes
        yield from pa.ipc.open_stream(source)
        return
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _check_columns(batches: Sequence[Any], path: Path) -> None:
    """Make sure that every batch has each column of the first, once."""
    names = batches[0].schema.names
    for found in dict.fromkeys(tuple(batch.schema.names) for batch in batches):
        odd = [name for name in names if found.count(name) != 1]
        if odd:
            raise UserError(
                f"{path}: the column {odd[0]} comes {found.count(odd[0])} times in some rows; pack "
                "files of the same columns, each with a name of its own"
            )


def _cell(batch: Any, name: str, row: int) -> Any:
    """Return a cell as Python's own value."""
    try:
        return batch.column(name)[row].as_py()
    except (ValueError, LookupError, OverflowError, NotImplementedError) as error:
        raise BadSample(f"{name} has no value in Python ({error})") from None


def _field(batches: Sequence[Any], name: str, path: Path, root: str) -> Field:
    import pyarrow as pa

    kind = batches[0].schema.field(name).type
    if pa.types.is_struct(kind) and {"bytes", "path"} <= {f.name for f in kind}:
        return Field(name=name, kind="image")
    try:
        cell = _cell(batches[0], name, 0)
        if isinstance(cell, bytes) and _is_image(cell):
            return Field(name=name, kind="image")
        return values.field_of(name, _plain(cell))
    except BadSample as error:
        raise UserError(f"{path}, row 0: {error} (below {root})") from None


def _is_image(data: bytes) -> bool:
    try:
        pictures.check_file(data)
    except BadSample:
        return False
    return True


def _value(field: Field, cell: Any, root: str) -> Any:
    if cell is None:
        raise BadSample(f"{field.name} is empty (null)")
    if field.kind == "image" and isinstance(cell, dict):
        return _image_file(field, cell, root)
    if field.kind != "array" or field.holder != "numpy":
        return cell
    # Without a number in it, a list has no type of its own.
    found = np.empty(0, field.dtype) if cell == [] else _plain(cell)
    is_empty = isinstance(found, np.ndarray) and not found.size
    return found.astype(field.dtype) if is_empty else found


def _image_file(field: Field, cell: dict[str, Any], root: str) -> Any:
    data, name = cell.get("bytes"), cell.get("path")
    if data is not None:
        return data
    if not isinstance(name, str):
        raise BadSample(f"{field.name} has neither bytes nor a path")
    path = Path(root, name)
    # A stranger's table would bring any image of this machine into the store.
    try:
        is_inside = path.resolve().is_relative_to(Path(root).resolve())
    except (OSError, ValueError) as error:
        raise BadSample(f"no file has such a name ({error})") from None
    if not is_inside:
        raise BadSample(f"{field.name} names {name}, which is outside {root}")
    return read_file(path)


def _plain(cell: Any) -> Any:
    """Return nested lists of numbers as an array, everything else as it is."""
    if isinstance(cell, list) and cell and isinstance(cell[0], list):
        try:
            array = np.asarray(cell)
        except ValueError:
            return cell
        return array if array.dtype.kind in values.ARRAY_KINDS else cell
    return cell


def _class_names(path: Path, label: str, schema: Any) -> tuple[str, ...]:
    """Return the names that Hugging Face keeps alongside a label column."""
    info = path / "dataset_info.json"
    try:
        if info.is_file():
            features = read_json(info).get("features") or {}
        else:
            raw = (schema.metadata or {}).get(b"huggingface", b"{}")
            features = parse_json(raw).get("info", {}).get("features") or {}
        names = (features.get(label) or {}).get("names") or ()
        return tuple(map(str, names))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"{path}: what Hugging Face wrote about the columns is damaged ({error}); save the "
            "data set again"
        ) from None
