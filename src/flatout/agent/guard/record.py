"""A guard record: what one guard trial leaves behind, for the judge to read."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.records.input_files import MAX_NPZ_BYTES, check_unpacked_size, parse_json
from flatout.records.json_records import from_plain

SCHEMA = "flatout.guard/2"
SKETCH = "64 signed sums, block 1"
"""How the sketches were made. Two records are comparable only if this is equal."""

Numbers = npt.NDArray[np.float64]
Sketches = Mapping[str, Numbers]
"""Sketch of each tensor, by the tensor's name."""
Marks = tuple[tuple[int, str], ...]
"""After each batch: rows seen so far, and the digest of everything up to there."""
Streams = Mapping[str, Mapping[str, Marks]]
"""Digests by place (a loader, a root), then by field of what passed there."""

BEFORE_CLIP = "before_clip"
"""The gradient at the end of the last backward, divided by the gradient scaler's scale."""
AT_STEP = "at_step"
"""The gradient as the optimizer sees it: clipped, unscaled."""
UPDATE = "update"
"""What the first step did to the parameters, for scripts without an optimizer to shadow."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradientSet:
    """The gradients of one optimizer's parameters at one point of one step."""

    optimizer: int
    """Number of the optimizer, in the order of construction."""
    step: int
    """Number of this optimizer's step, from 1."""
    point: str
    """`before_clip`, `at_step` or `update`."""
    moved: bool
    """Whether any optimizer had stepped before: parameters are then equal up to rounding only."""
    sketches: Sketches


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecord:
    """One optimizer as the script (and the recipe) set it up."""

    number: int
    kind: str
    """`module:qualified name` of its class."""
    groups: tuple[tuple[str, ...], ...]
    """Names of the parameters in each group, at the first step."""
    settings: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """Plain hyper-parameters for each recorded step, for each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one step did to the parameters, against the shadow of the baseline's optimizer."""

    optimizer: int
    step: int
    tensors: Mapping[str, tuple[float, float, float, float]]
    """By name: norm of (update - shadow update), of the shadow update, of the parameter; and half
    the spacing of its dtype at 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GuardRecord:
    """Everything the judge compares."""

    torch: str
    device: str
    threads: int
    low_precision: bool = False
    """Whether the script itself ran under autocast or has half-precision parameters."""
    tf32: bool = False
    """Whether its device may round the fp32 products of its layers to TF32."""
    samples: Streams = field(default_factory=dict)
    """What the loaders gave, by loader address."""
    arguments: Streams = field(default_factory=dict)
    """What the roots were called with in training, by root."""
    structure: Mapping[str, str] = field(default_factory=dict)
    """One line for each module: type, mode, rates."""
    optimizers: tuple[OptimizerRecord, ...] = ()
    start: Sketches = field(default_factory=dict)
    """Parameters before their optimizer's first step."""
    gradients: tuple[GradientSet, ...] = ()
    updates: tuple[Update, ...] = ()
    has_reference: bool = False
    """Whether updates were compared with the baseline's optimizer, not with the script's own."""
    update_gaps: tuple[str, ...] = ()
    """Why updates were not compared, where they were not."""
    buffers: Sketches = field(default_factory=dict)
    """Buffers of the roots after the first step."""
    later: Mapping[str, str] = field(default_factory=dict)
    """Which modules change their mode or a rate and when, which buffers go on changing."""
    losses: tuple[float, ...] = ()
    """Loss between one optimizer step and the next, micro-batches added up."""
    draws: bool = True
    """Whether random numbers were drawn between a forward and the end of its backward."""
    errors: tuple[str, ...] = ()
    """Probe failures in the trial."""


def write_record(record: GuardRecord, path: Path) -> None:
    """Write the record as one file; readers see all of it or nothing."""
    pool: list[Numbers] = []
    plain = {
        name: getattr(record, name)
        for name in GuardRecord.__slots__
        if name not in ("start", "gradients", "buffers", "optimizers", "updates")
    }
    plain |= {
        "schema": SCHEMA,
        "sketch": SKETCH,
        "optimizers": [asdict(item) for item in record.optimizers],
        "updates": [asdict(item) for item in record.updates],
        "start": _pack(record.start, pool),
        "buffers": _pack(record.buffers, pool),
        "gradients": [
            {name: getattr(item, name) for name in ("optimizer", "step", "point", "moved")}
            | {"sketches": _pack(item.sketches, pool)}
            for item in record.gradients
        ],
    }
    meta = np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8)
    numbers = np.concatenate(pool) if pool else np.zeros(0)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, meta=meta, numbers=numbers)
    unfinished.replace(path)


def read_record(path: Path) -> GuardRecord:
    """Return the record that `write_record` wrote.

    Raises:
        ValueError: if there is none, it is damaged, or was made in another way.
    """
    try:
        check_unpacked_size(path, MAX_NPZ_BYTES)
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            plain = dict(parse_json(bytes(file["meta"])))
            numbers = file["numbers"]
        made = (plain.pop("schema", None), plain.pop("sketch", None))
        if made != (SCHEMA, SKETCH):
            raise ValueError(f"it was made as {made}, not {(SCHEMA, SKETCH)}")
        return _record(plain, numbers)
    except Exception as error:
        raise ValueError(f"no readable guard record at {path}: {error}") from error


def rank_path(path: Path, rank: int) -> Path:
    """Return where a rank leaves its record: the first rank at the path, the others alongside it.

    >>> rank_path(Path("guard.json"), 0).name, rank_path(Path("guard.json"), 3).name
    ('guard.json', 'guard-rank3.json')
    """
    return path.with_name(f"{path.stem}-rank{rank}{path.suffix}") if rank else path


def find_records(path: str | Path | None) -> tuple[GuardRecord, ...]:
    """Return the records of all ranks, by rank; of those that can be read."""
    if path is None:
        return ()
    first = Path(path)
    others = first.parent.glob(f"{first.stem}-rank*{first.suffix}")
    ranked = sorted(others, key=lambda other: int(other.stem.rpartition("rank")[2]))
    return tuple(record for each in (first, *ranked) if (record := find_record(each)) is not None)


def find_record(path: str | Path | None) -> GuardRecord | None:
    """Return the record at a path, None where there is none that can be read."""
    if path is None:
        return None
    try:
        return read_record(Path(path))
    except ValueError:
        return None


def _record(plain: dict[str, Any], numbers: Numbers) -> GuardRecord:
    packed = {name: plain.pop(name) for name in ("start", "buffers", "gradients")}
    return replace(
        from_plain(GuardRecord, plain),
        start=_unpack(packed["start"], numbers),
        buffers=_unpack(packed["buffers"], numbers),
        gradients=tuple(
            GradientSet(**item | {"sketches": _unpack(item["sketches"], numbers)})
            for item in packed["gradients"]
        ),
    )


def _pack(sketches: Sketches, pool: list[Numbers]) -> dict[str, Any]:
    start = sum(len(item) for item in pool)
    arrays = [np.asarray(value, dtype=np.float64) for value in sketches.values()]
    if arrays:
        pool.append(np.concatenate(arrays))
    return {"start": start, "names": list(sketches), "lengths": [len(item) for item in arrays]}


def _unpack(packed: Mapping[str, Any], numbers: Numbers) -> Sketches:
    ends = packed["start"] + np.cumsum(packed["lengths"], dtype=np.int64)
    return {
        name: numbers[end - length : end]
        for name, length, end in zip(packed["names"], packed["lengths"], ends, strict=True)
    }
