"""Pack a source: estimate, write the file shards, put the store together.

A pack (`pack`) can be killed at any moment; the same call goes on and ends with the same bytes.
`encoded_parts` makes the record of one sample.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from flatout.data import pictures, staging, values, worker_pool
from flatout.data.format import (
    ENTRY,
    HASH_BYTES,
    HEADER,
    INDEX,
    MAX_FIELD_BYTES,
    NAMES,
    NO_LABEL,
    RAISE,
    SKIPPED,
    BadSample,
    Encoding,
    Field,
    FileShard,
    Header,
    Skipped,
    checksum,
    content_hash,
    join_record,
    read_header,
    refuse,
    shard_name,
    write_header,
)
from flatout.data.sampler import permutation
from flatout.data.sources.source import Source, fingerprint_of
from flatout.data.staging import FinishedPart, PackPlan
from flatout.data.worker_pool import Tick
from flatout.records.errors import UserError
from flatout.records.input_files import MAX_OWN_BYTES as MAX_TOKENIZER_BYTES
from flatout.records.input_files import read_bytes
from flatout.records.live import Progress
from flatout.records.messages import words
from flatout.records.units import format_bytes

BYTES = "bytes"
"""The tokenizer that needs no file: each UTF-8 byte is a token."""


def check(encoding: Encoding, fields: Sequence[Field]) -> None:
    """Make sure that the encoding can be done, and has something to do."""
    pictures.check_encoding(encoding)
    wanted = {"original": "", "tokens": "str"}.get(encoding.kind, "image")
    if wanted and not any(field.kind == wanted for field in fields):
        known = ", ".join(f"{field.name} ({field.kind})" for field in fields)
        what = "text" if wanted == "str" else "image"
        raise UserError(f"--encode {encoding.kind} needs a field of {what}s; there are: {known}")
    if encoding.kind == "tokens":
        _tokenizer.cache_clear()  # the file may be another one since the pack before this one
        _largest_token.cache_clear()
        _tokenizer(encoding.tokenizer)


def tokenizer_digest(encoding: Encoding) -> str:
    """Return a hash of the tokenizer's file; empty where the encoding has none."""
    if encoding.kind != "tokens" or encoding.tokenizer == BYTES:
        return ""
    return hashlib.blake2b(_tokenizer_file(encoding.tokenizer), digest_size=16).hexdigest()


def stored_fields(fields: Sequence[Field], encoding: Encoding) -> tuple[Field, ...]:
    """Return the fields of the store: texts are arrays of tokens there."""
    if encoding.kind != "tokens":
        return tuple(fields)
    dtype = token_dtype(encoding)
    return tuple(
        dataclasses.replace(field, kind="array", dtype=dtype, holder="numpy")
        if field.kind == "str"
        else field
        for field in fields
    )


def source_parts(fields: Sequence[Field], sample: Sequence[Any]) -> list[bytes]:
    """Return the payloads of a sample as the source has it.

    Raises:
        BadSample: if a value is damaged, too large, or of another kind than in the samples before.
    """
    pairs = zip(fields, sample, strict=True)
    return [_bounded(field, values.payload(field, one)) for field, one in pairs]


def encoded_parts(
    fields: Sequence[Field], parts: Sequence[bytes], encoding: Encoding
) -> list[bytes]:
    """Return the payloads as they are stored.

    Raises:
        BadSample: if a value cannot be encoded, or is too large then.
    """
    if encoding.kind == "original":
        return list(parts)
    pairs = zip(fields, parts, strict=True)
    return [_bounded(field, _encoded(field, part, encoding)) for field, part in pairs]


def _bounded(field: Field, part: bytes) -> bytes:
    if len(part) > MAX_FIELD_BYTES:
        raise BadSample(f"field {field.name!r} has {len(part)} bytes, and 4 GiB are too many")
    return part


def _encoded(field: Field, part: bytes, encoding: Encoding) -> bytes:
    if field.kind == "image":
        return pictures.encode(part, encoding)
    if field.kind == "str" and encoding.kind == "tokens":
        tokens = _tokens(part, encoding)
        wanted = dataclasses.replace(field, kind="array", dtype=tokens.dtype.str)
        return values.payload(wanted, tokens)
    return part


def is_same(field: Field, source: bytes, stored: memoryview) -> bool:
    """Return whether a losslessly stored payload gives back what the source has."""
    if source == stored:
        return True
    if field.kind != "image":
        return False
    before, after = pictures.open_image(memoryview(source)), pictures.open_image(stored)
    return before.mode == after.mode and np.array_equal(np.asarray(before), np.asarray(after))


def token_dtype(encoding: Encoding) -> str:
    """Return the smallest type that holds the tokenizer's words.

    >>> token_dtype(Encoding(kind="tokens", tokenizer="bytes"))
    '<u2'
    """
    if encoding.tokenizer == BYTES:
        return "<u2"
    return "<u2" if _largest_token(encoding.tokenizer) < 2**16 else "<u4"


def _tokens(part: bytes, encoding: Encoding) -> "np.ndarray[Any, np.dtype[Any]]":
    dtype = token_dtype(encoding)
    if encoding.tokenizer == BYTES:
        return np.frombuffer(part, np.uint8).astype(dtype)
    try:
        text = part.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadSample(f"the text is not Unicode ({error})") from None
    tokenizer = _tokenizer(encoding.tokenizer)
    try:
        return np.asarray(tokenizer.encode(text).ids, dtype=dtype)
    except Exception as error:  # noqa: BLE001  the library raises bare Exception
        raise BadSample(f"the tokenizer cannot encode the text ({error})") from None


@cache
def _largest_token(path: str) -> int:
    return max(_tokenizer(path).get_vocab(with_added_tokens=True).values(), default=0)


def _tokenizer_file(path: str) -> bytes:
    try:
        return read_bytes(path, MAX_TOKENIZER_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a tokenizer.json that can be read: {error}") from None


@cache
def _tokenizer(path: str) -> Any:
    """Return a Hugging Face tokenizer that gives all tokens of a text; nothing for `bytes`."""
    if path == BYTES:
        return None
    if not path:
        raise UserError("--encode tokens needs --tokenizer: bytes, or a tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("a tokenizer.json needs tokenizers: pip install 'flatout[pack]'") from None
    try:
        made = Tokenizer.from_buffer(_tokenizer_file(path))
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer.json that can be read: {error}") from None
    made.no_truncation()  # which the file may ask for, as for padding: for a model's input
    made.no_padding()
    return made


TICK_SAMPLES = 64
"""Samples between two ticks."""
Shape = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class WriteShard:
    """Write one file shard in a worker: read, check, encode, hash.

    The shard is a function of the plan and the source alone.
    """

    source: Source
    plan: PackPlan
    folder: Path
    order: "np.ndarray[tuple[int], np.dtype[np.int64]]"

    def __call__(self, number: int, tick: Tick) -> int:
        """Write the file shard of that number and its part; return its samples."""
        path = self.folder / shard_name(number)
        draft = path.with_name(f"{path.name}{staging.DRAFT}{os.getpid()}")
        try:
            with draft.open("wb") as file:
                records = _Records(self, number, file, tick)
                records.write()
                file.flush()
                staging.sync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        staging.write_part(self.folder, number, records.part())
        return len(records.rows)


class _Records:
    """The records of one shard, while they are written."""

    def __init__(self, job: WriteShard, number: int, file: IO[bytes], tick: Tick) -> None:
        self.job, self.number, self.file, self.tick = job, number, file, tick
        contents = job.source.contents
        self.fields = contents.fields
        self.stored = stored_fields(contents.fields, job.plan.encoding)
        names = [field.name for field in contents.fields]
        self.label_at = names.index(contents.label) if contents.label else -1
        self.rows: list[tuple[Any, ...]] = []
        self.names: list[str] = []
        self.skipped: list[Skipped] = []
        self.shapes: list[set[Shape]] = [set() for _ in self.stored]
        self.at = 0

    def write(self) -> None:
        span = self.job.plan.span(self.number)
        for count, original in enumerate(self.job.order[span.start : span.stop], start=1):
            self._write_one(int(original))
            if count % TICK_SAMPLES == 0 or count == len(span):
                self.tick((count - 1) % TICK_SAMPLES + 1)

    def _write_one(self, original: int) -> None:
        source, plan = self.job.source, self.job.plan
        try:
            sample = source.read(original)
            parts = source_parts(self.fields, sample)
            stored = encoded_parts(self.fields, parts, plan.encoding)
        except BadSample as error:
            name = source.name(original)
            refuse(name, str(error), on_bad=plan.on_bad, skipped=self.skipped)
            return
        record = join_record(stored)
        label = sample[self.label_at] if self.label_at >= 0 else NO_LABEL
        digest = np.frombuffer(content_hash(parts), np.uint8, HASH_BYTES)
        place = (self.number, self.at, len(record), original)
        self.rows.append((*place, label, checksum(record), digest))
        if source.contents.is_named:
            self.names.append(source.name(original))
        for shapes, field, payload in zip(self.shapes, self.stored, stored, strict=True):
            shapes.add(values.shape_of(field, payload))
        self.file.write(record)
        self.at += len(record)

    def part(self) -> FinishedPart:
        return FinishedPart(
            entries=np.array(self.rows, dtype=ENTRY),
            names=self.names,
            skipped=self.skipped,
            bytes=self.at,
            shapes=[next(iter(shapes)) if len(shapes) == 1 else None for shapes in self.shapes],
        )


SHARD_BYTES = 64 * 2**20
"""Aimed at for one file shard: what a kill costs at most, per worker, is making one again."""
MAX_SHARD_SAMPLES = 65_536
"""Small samples fill a shard slowly; progress is kept by shards."""
ESTIMATE_SAMPLES = 64
"""Encoded to estimate the size; of photographs the mean is then within a tenth or so."""
INDEX_BYTES = ENTRY.itemsize + 40
"""Per sample: its row of the index, and a name."""
SHUFFLED, AS_SOURCE = "shuffled", "source"
Tell = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """How to pack."""

    encoding: Encoding = Encoding()  # noqa: RUF009  frozen: one is as good as many
    seed: int = 0
    """Of the global permutation."""
    is_shuffled: bool = True
    workers: int = 1
    on_bad: str = RAISE
    shard_bytes: int = SHARD_BYTES
    method: str | None = None
    """How worker processes start: fork or spawn; None decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a pack will take."""

    bytes: int
    free_bytes: int
    mean_bytes: float


def pack(source: Source, folder: Path, options: PackOptions, tell: Tell) -> Header:
    """Write the source into the folder, or go on where an earlier call was ended.

    Raises:
        UserError: if the folder is in use or holds something else, the disk is too small or full,
            a sample is bad under the policy `raise`, or a worker died.
    """
    staging.check_empty(folder)
    with staging.locked(folder):
        return pack_held(source, folder, options, tell)


def pack_held(source: Source, folder: Path, options: PackOptions, tell: Tell) -> Header:
    """Do what `pack` does, for who holds the folder (`staging.locked`) already."""
    check(options.encoding, source.contents.fields)
    with worker_pool.failures_worded():
        if (folder / HEADER).is_file():
            return _finished(source, folder, options)
        estimate = estimated(source, folder, options)
        plan = staging.agree(folder, _plan(source, options, estimate))
        left = staging.missing_shards(folder, plan)
        _check_room(estimate, len(left) / plan.shards, folder)
        tell(_beginning(estimate, len(left) / plan.shards, folder))
        try:
            _write(source, folder, options, plan, tell)
            return _assemble(source, folder, plan)
        finally:
            staging.remove_drafts(folder)


def _finished(source: Source, folder: Path, options: PackOptions) -> Header:
    """Return the header of a store that is complete."""
    header = read_header(folder)
    wanted = (
        _fingerprint(source, options.encoding),
        options.encoding,
        options.seed,
        _order_word(options.is_shuffled),
    )
    found = (header.source.get("fingerprint"), header.encoding, header.seed, header.order)
    if wanted != found:
        raise UserError(
            f"{folder} is packed already, from another source or with other options; choose "
            "another folder, or remove this one"
        )
    return header


def _fingerprint(source: Source, encoding: Encoding) -> str:
    """Return what changes with the source, and with the tokenizer that its texts go through."""
    digest = tokenizer_digest(encoding)
    return fingerprint_of([source.fingerprint(), digest]) if digest else source.fingerprint()


def estimated(source: Source, folder: Path, options: PackOptions) -> Estimate:
    """Return the size to expect, from samples spread over the source, and the room there is."""
    count = min(ESTIMATE_SAMPLES, len(source))
    drawn = np.linspace(0, len(source) - 1, count).astype(int)
    sizes = [size for index in drawn if (size := _stored_bytes(source, int(index), options))]
    mean = sum(sizes) / len(sizes) if sizes else 0.0
    return Estimate(
        bytes=round((mean + INDEX_BYTES) * len(source)),
        free_bytes=shutil.disk_usage(folder).free,
        mean_bytes=mean,
    )


def _stored_bytes(source: Source, index: int, options: PackOptions) -> int:
    """Return the bytes of a record; 0 for a bad sample, which is dealt with when its turn comes."""
    fields = source.contents.fields
    try:
        parts = source_parts(fields, source.read(index))
        return len(join_record(encoded_parts(fields, parts, options.encoding)))
    except BadSample:
        return 0


def _check_room(estimate: Estimate, share: float, folder: Path) -> None:
    needed = estimate.bytes * share
    if needed > estimate.free_bytes:
        raise UserError(
            f"about {format_bytes(needed)} are needed and {format_bytes(estimate.free_bytes)} are "
            f"free in {folder}; choose another disk, or a smaller encoding (--short-side)"
        )


def _beginning(estimate: Estimate, share: float, folder: Path) -> Progress:
    """Return the first that is told: what will be written, and where there is room for it."""
    size, free = format_bytes(estimate.bytes * share), format_bytes(estimate.free_bytes)
    return Progress(
        trying=words("packing.start"),
        done_share=1 - share,
        elapsed_s=0.0,
        left_s=0.0,
        event=words("packing.room", size=size, free=free, folder=str(folder)),
    )


def _plan(source: Source, options: PackOptions, estimate: Estimate) -> PackPlan:
    per_shard = int(options.shard_bytes / max(1.0, estimate.mean_bytes))
    return PackPlan(
        kind=source.contents.kind,
        fingerprint=_fingerprint(source, options.encoding),
        samples=len(source),
        per_shard=max(1, min(per_shard, MAX_SHARD_SAMPLES)),
        encoding=options.encoding,
        seed=options.seed,
        is_shuffled=options.is_shuffled,
        on_bad=options.on_bad,
    )


def stored_order(plan: PackPlan) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return the number in the source of each place in stored order."""
    if plan.is_shuffled:
        return permutation(plan.samples, seed=plan.seed, epoch=0)
    return np.arange(plan.samples, dtype=np.int64)


def _write(source: Source, folder: Path, options: PackOptions, plan: PackPlan, tell: Tell) -> None:
    """Write the file shards that are missing."""
    left = staging.missing_shards(folder, plan)
    counted = Counter(plan.samples, plan.samples - sum(len(plan.span(n)) for n in left), tell)
    job = WriteShard(source, plan, folder, stored_order(plan))
    done = worker_pool.perform(
        job, left, workers=options.workers, method=options.method, tick=counted.tick
    )
    with closing(done):  # an exception here ends the workers at once, not some time later
        for _number, _samples in done:
            counted.tick(0)


class Counter:
    """Tells how far a pack has come."""

    def __init__(self, samples: int, done: int, tell: Tell, verb: str = "packing") -> None:
        self.samples, self.before, self.done = samples, done, done
        self.tell, self.verb = tell, verb
        self.started = time.monotonic()

    def tick(self, count: int) -> None:
        """Count samples and tell."""
        self.done += count
        elapsed_s = time.monotonic() - self.started
        rate = (self.done - self.before) / elapsed_s if elapsed_s else 0.0
        self.tell(
            Progress(
                trying=words(
                    f"packing.{self.verb}",
                    n=str(self.done),
                    of=str(self.samples),
                    rate=f"{rate:.0f}",
                ),
                done_share=min(1.0, self.done / self.samples),
                elapsed_s=elapsed_s,
                left_s=(self.samples - self.done) / rate if rate else 0.0,
            )
        )


def _assemble(source: Source, folder: Path, plan: PackPlan) -> Header:
    """Put index, names and header together from the parts; the header comes last."""
    parts = [staging.read_part(folder, number) for number in range(plan.shards)]
    entries = np.concatenate([part.entries for part in parts])
    skipped = [*source.contents.skipped, *(item for part in parts for item in part.skipped)]
    if not len(entries):
        raise UserError(
            f"all {plan.samples} samples are bad; the first: {skipped[0].name}: {skipped[0].reason}"
        )
    _write_index(folder, entries)
    if source.contents.is_named:
        names = (json.dumps(name) for part in parts for name in part.names)
        staging.write_whole(folder / NAMES, "".join(f"{name}\n" for name in names).encode())
    lines = (json.dumps({"name": item.name, "reason": item.reason}) for item in skipped)
    staging.write_whole(folder / SKIPPED, "".join(f"{line}\n" for line in lines).encode())
    header = _header(source, plan, parts, len(skipped))
    write_header(header, folder)
    return header


def _write_index(folder: Path, entries: staging.Entries) -> None:
    """Write what `numpy.save` does; but `write` says it with a number where the disk is full."""
    draft = folder / f"{INDEX}{staging.DRAFT}"
    with draft.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, np.lib.format.header_data_from_array_1_0(entries)
        )
        file.write(entries.view(np.uint8).data)
        file.flush()
        staging.sync(file.fileno())
    draft.replace(folder / INDEX)


def _header(source: Source, plan: PackPlan, parts: Sequence[FinishedPart], skipped: int) -> Header:
    contents = source.contents
    return Header(
        samples=sum(len(part.entries) for part in parts),
        fields=_with_shapes(stored_fields(contents.fields, plan.encoding), parts),
        structure=contents.structure,
        encoding=plan.encoding,
        order=_order_word(plan.is_shuffled),
        seed=plan.seed,
        shards=tuple(
            FileShard(name=shard_name(n), samples=len(part.entries), bytes=part.bytes)
            for n, part in enumerate(parts)
        ),
        classes=contents.classes,
        label=contents.label,
        source={
            "kind": contents.kind,
            "root": contents.root,
            "fingerprint": plan.fingerprint,
            "samples": plan.samples,
            **({"sample_of": contents.sample_of} if contents.sample_of else {}),
        },
        skipped=skipped,
    )


def _with_shapes(fields: Sequence[Field], parts: Sequence[FinishedPart]) -> tuple[Field, ...]:
    """Return the fields, each with its shape where all file shards agree on one."""
    full = [part for part in parts if len(part.entries)]
    found = [{part.shapes[place] for part in full} for place in range(len(fields))]
    return tuple(
        replace(field, shape=next(iter(shapes)) if len(shapes) == 1 else None)
        for field, shapes in zip(fields, found, strict=True)
    )


def _order_word(is_shuffled: bool) -> str:  # noqa: FBT001  its one and only argument
    return SHUFFLED if is_shuffled else AS_SOURCE
