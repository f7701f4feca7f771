"""Prove that a packed store equals its source, sample by sample, or that it is what was written."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data import values, worker_pool, writer
from flatout.data.format import (
    NAMES,
    SKIPPED,
    BadSample,
    Field,
    Header,
    checksum,
    content_hash,
    join_record,
    split_record,
)
from flatout.data.packed_store import PackedStore
from flatout.data.sources.source import Source
from flatout.data.writer import TICK_SAMPLES, Counter, Tell
from flatout.records.errors import UserError
from flatout.records.messages import words

MAX_PROBLEMS = 20
"""Named one by one; more of them say nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was compared, and what differs."""

    samples: int
    skipped: int
    problems: tuple[str, ...] = ()
    num_problems: int = 0


@dataclass(frozen=True, slots=True)
class ShardProblems:
    """The job of a worker: what is wrong with the samples of one file shard.

    Their records are compared with the index, and with the source where there is one.
    """

    store: PackedStore
    source: Source | None = None

    def __call__(self, number: int, tick: worker_pool.Tick) -> list[tuple[int, str]]:
        """Return the places of samples with a problem, each with its words."""
        problems = []
        places = np.flatnonzero(self.store.index["shard"] == number)
        for count, place in enumerate(map(int, places), start=1):
            problem = self._find_problem(place)
            if problem:
                problems.append((place, problem))
            if count % TICK_SAMPLES == 0 or count == len(places):
                tick((count - 1) % TICK_SAMPLES + 1)
        return problems

    def _find_problem(self, place: int) -> str:
        """Return what is wrong with one sample, empty for nothing."""
        entry, record = self.store.index[place], self.store.record(place)
        is_damaged = len(record) != entry["length"] or checksum(record) != entry["check"]
        if self.source is None:
            return words("store.damaged") if is_damaged else self._other_label(entry, record)
        number = int(entry["original"])
        name = self.source.name(number)
        if is_damaged:
            return words("joint.because", one=name, other=words("store.damaged"))
        fields = self.source.contents.fields
        try:
            parts = writer.source_parts(fields, self.source.read(number))
        except BadSample as error:
            return words("store.changed_how", name=name, error=str(error))
        if content_hash(parts) != entry["hash"].tobytes():
            return words("store.changed", name=name)
        return "" if self._is_same(fields, parts, record) else words("store.differs", name=name)

    def _is_same(self, fields: Sequence[Field], parts: Sequence[bytes], record: memoryview) -> bool:
        encoding = self.store.header.encoding
        if not encoding.is_lossless:
            return join_record(writer.encoded_parts(fields, parts, encoding)) == bytes(record)
        stored = split_record(record, len(fields))
        return all(map(writer.is_same, fields, parts, stored))

    def _other_label(self, entry: Any, record: memoryview) -> str:
        """Return that the index has another label than the record, empty where it has not."""
        header = self.store.header
        names = [field.name for field in header.fields]
        if not header.label:
            return ""
        at = names.index(header.label)
        label = values.value(header.fields[at], split_record(record, len(names))[at])
        known = entry["label"]
        return "" if label == known else words("store.other_label", label=str(known))


def verify(source: Source, folder: Path, *, workers: int = 1, tell: Tell) -> Verification:
    """Compare every stored sample with the source, and every sample of the source with the store.

    A lossless store gives back the source's bytes, pixels and numbers. A lossy one holds exactly
    what its encoding makes of the source.
    """
    store = PackedStore(folder)
    header = store.header
    if header.source["samples"] != len(source):
        raise UserError(
            f"{folder} was packed from {header.source['samples']} samples, and the source has "
            f"{len(source)} now"
        )
    counted = Counter(max(1, header.samples), 0, tell, "verifying")
    problems = _find_miscounted(store, len(source))
    numbers = [n for n, shard in enumerate(header.shards) if shard.samples]
    job = ShardProblems(store, source)
    done = worker_pool.perform(job, numbers, workers=workers, tick=counted.tick)
    with closing(done):
        for _number, found in sorted(done):
            problems += [problem for _place, problem in found]
    return Verification(
        samples=header.samples,
        skipped=header.skipped,
        problems=tuple(problems[:MAX_PROBLEMS]),
        num_problems=len(problems),
    )


def check(folder: Path, *, workers: int = 1, tell: Tell) -> tuple[Header, list[str]]:
    """Compare every record of a store with its checksum, and the index with the header.

    Returns:
        The header, and every problem with the name of its sample.

    Raises:
        UserError: if there is no complete store.
    """
    store = PackedStore(folder)
    counted = Counter(max(1, store.header.samples), 0, tell, "checking")
    names = _names(store)
    problems = _find_inconsistent(store, names)
    numbers = [n for n, shard in enumerate(store.header.shards) if shard.samples]
    done = worker_pool.perform(ShardProblems(store), numbers, workers=workers, tick=counted.tick)
    with closing(done):
        damaged = sorted(pair for _number, found in done for pair in found)
    for place, problem in damaged:
        number = words("store.sample", n=str(store.index["original"][place]))
        name = names[place] if len(names) == len(store) else number
        problems.append(words("joint.because", one=name, other=problem))
    return store.header, problems


def _names(store: PackedStore) -> tuple[str, ...]:
    """Return the names in the store; none where there are none, or they cannot be read."""
    try:
        return store.names
    except ValueError:
        return ()


def _find_inconsistent(store: PackedStore, names: Sequence[str]) -> list[str]:
    """Return where index, names, list of skipped samples and header contradict each other."""
    header = store.header
    problems = _find_miscounted(store, int(header.source["samples"]))
    shards = np.asarray(store.index["shard"])
    if shards.max(initial=0) >= max(1, len(header.shards)):
        problems.append(words("store.no_such_shard"))
    for number, shard in enumerate(header.shards):
        count = int((shards == number).sum())
        if count != shard.samples:
            about = {"n": str(count), "shard": shard.name, "all": str(shard.samples)}
            problems.append(words("store.other_count", **about))
    if (store.folder / NAMES).is_file() and len(names) != header.samples:
        problems.append(words("store.names", file=NAMES, n=str(header.samples)))
    return problems


def _find_miscounted(store: PackedStore, samples: int) -> list[str]:
    """Return what shows that samples come twice, or are missing and not listed as skipped."""
    originals = np.asarray(store.index["original"])
    problems: list[str] = []
    if len(np.unique(originals)) != len(originals) or originals.max(initial=0) >= samples:
        problems.append(words("store.twice"))
    path = store.folder / SKIPPED
    listed = path.read_bytes().count(b"\n") if path.is_file() else 0
    if listed != store.header.skipped or listed < samples - len(originals):
        missing = str(samples - len(originals))
        problems.append(words("store.missing", n=missing, listed=str(listed)))
    return problems
