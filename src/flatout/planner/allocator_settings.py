"""Settings of torch's caching allocator, read from the text that PYTORCH_ALLOC_CONF holds.

The rules are those of torch 2.13: c10/core/AllocatorConfig.h, c10/cuda/CUDAAllocatorConfig.cpp.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flatout.records.errors import UserError, unknown
from flatout.records.units import MIB

MIN_BLOCK = 512
"""Sizes are rounded to multiples of this (kMinBlockSize)."""
SMALL_SIZE = MIB
"""The largest allocation of the small pool (kSmallSize)."""
SMALL_SEGMENT = 2 * MIB
"""A segment of the small pool (kSmallBuffer)."""
LARGE_SEGMENT = 20 * MIB
"""A segment that allocations from 1 to 10 MiB share (kLargeBuffer)."""
MIN_LARGE = 10 * MIB
"""From here on an allocation has a segment of its own size (kMinLargeAlloc)."""
ROUND_LARGE = 2 * MIB
"""Such a segment is a multiple of this (kRoundLarge)."""
INTERVALS = 16
"""Powers of two from 1 MiB to 64 GiB for which roundup_power2_divisions may differ."""
FIRST_INTERVAL_BITS = 20
"""The first of them is 2**20 bytes."""
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch looks, the first that is set wins."""
IGNORED = frozenset(
    {
        "backend",
        "graph_capture_record_stream_reuse",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
    }
)
"""Keys that torch knows and that change nothing here: they are about host memory and locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """How the allocator rounds, splits and gives back."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    """Blocks of this size or more are never split; None splits all."""
    max_non_split_rounding: int = LARGE_SEGMENT
    """How much larger than asked for a block may be that is not split."""
    garbage_collection_threshold: float = 0.0
    """Share of the allowed memory beyond which unused segments are given back; 0 never."""
    roundup_divisions: tuple[int, ...] = ()
    """Divisions between two powers of two, for each interval from 1 MiB on; empty rounds to 512."""
    large_segment: int = LARGE_SEGMENT
    memory_fraction: float | None = None
    """Share of the device that the process may use, where it is limited."""

    def rounded(self, size: int) -> int:
        """Return what an allocation of this size takes.

        >>> AllocatorSettings().rounded(1), AllocatorSettings().rounded(1025)
        (512, 1536)
        >>> AllocatorSettings(roundup_divisions=(4,) * 16).rounded(5000)
        5120
        """
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self._divisions(size)
        if divisions > 1 and size > MIN_BLOCK * divisions:
            return _to_next_division(size, divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment_size(self, size: int) -> int:
        """Return the size of the segment that is asked of the device for a rounded size."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < MIN_LARGE:
            return self.large_segment
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    def _divisions(self, size: int) -> int:
        if not self.roundup_divisions:
            return 0
        interval = size.bit_length() - 1 - FIRST_INTERVAL_BITS
        return self.roundup_divisions[min(max(interval, 0), INTERVALS - 1)]


def parse_settings(text: str) -> AllocatorSettings:
    """Return the settings that a text such as `expandable_segments:True` asks for.

    >>> parse_settings("expandable_segments:True,max_split_size_mb:128").max_split_size
    134217728
    """
    settings = AllocatorSettings()
    for key, value in _pairs(text):
        if key in CONVERTERS:
            settings = replace(settings, **CONVERTERS[key](value))
        elif key not in IGNORED:
            known = sorted(IGNORED | CONVERTERS.keys())
            raise UserError(f"PYTORCH_ALLOC_CONF: {unknown('setting', key, known)}")
    return settings


def settings_of_environment(variables: Mapping[str, str]) -> AllocatorSettings:
    """Return the settings that a process with these environment variables starts with."""
    for name in VARIABLES:
        if variables.get(name):
            return parse_settings(variables[name])
    return AllocatorSettings()


def _pairs(text: str) -> list[tuple[str, str]]:
    plain = "".join(text.split())
    parts = re.findall(r"([^:,\[\]]+):(\[[^\]]*\]|[^,\[\]]*)(?:,|$)", plain)
    if ",".join(f"{key}:{value}" for key, value in parts) != plain.rstrip(","):
        raise UserError(
            f"PYTORCH_ALLOC_CONF={text!r} cannot be read; write key:value pairs with commas between"
        )
    return parts


def _to_next_division(size: int, divisions: int) -> int:
    """Return the next of the equal divisions between two powers of two."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    division = floor >> (divisions.bit_length() - 1)
    return -(-size // division) * division if division else floor << 1


def _flag(value: str) -> dict[str, Any]:
    if value not in ("True", "False"):
        raise UserError(f"PYTORCH_ALLOC_CONF: expandable_segments:{value}; give True or False")
    return {"expandable_segments": value == "True"}


def _number(key: str, value: str, least: float, most: float = float("inf")) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        bounds = f"at least {least:g}" + ("" if most == float("inf") else f" and at most {most:g}")
        raise UserError(f"PYTORCH_ALLOC_CONF: {key}:{value}; give a number, {bounds}")
    return number


def _mebibytes(key: str, field: str, least: int) -> Callable[[str], dict[str, Any]]:
    return lambda value: {field: int(_number(key, value, least)) * MIB}


def _share(key: str, field: str) -> Callable[[str], dict[str, Any]]:
    return lambda value: {field: _number(key, value, 1e-9, 1.0)}


def _divisions(value: str) -> dict[str, Any]:
    """Read `4`, or `[256:1,512:2,>:8]` with intervals in MiB."""
    if not value.startswith("["):
        return {"roundup_divisions": (_power(value),) * INTERVALS}
    table, last, is_first = [0] * INTERVALS, -1, True
    for part in filter(None, value[1:-1].split(",")):
        interval, _, count = part.partition(":")
        if interval == ">":
            table[last + 1 :] = [_power(count)] * (INTERVALS - last - 1)
            continue
        last = min(_power(interval).bit_length() - 1, INTERVALS - 1)
        if is_first:
            table[:last] = [_power(count)] * last
        table[last], is_first = _power(count), False
    return {"roundup_divisions": tuple(table)}


def _power(text: str) -> int:
    number = int(text) if text.isdigit() else -1
    if number < 0 or number & (number - 1):
        raise UserError(f"PYTORCH_ALLOC_CONF: roundup_power2_divisions: {text} is no power of two")
    return number


CONVERTERS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "expandable_segments": _flag,
    "max_split_size_mb": _mebibytes("max_split_size_mb", "max_split_size", 21),
    "max_non_split_rounding_mb": _mebibytes(
        "max_non_split_rounding_mb", "max_non_split_rounding", 21
    ),
    "large_segment_size_mb": _mebibytes("large_segment_size_mb", "large_segment", 1),
    "garbage_collection_threshold": _share(
        "garbage_collection_threshold", "garbage_collection_threshold"
    ),
    "per_process_memory_fraction": _share("per_process_memory_fraction", "memory_fraction"),
    "roundup_power2_divisions": _divisions,
}
"""Keys that change what the simulation does. torch refuses max_split_size_mb of 20 and less."""
