"""Settings of torch's caching allocator, read from the text that PYTORCH_ALLOC_CONF holds.

The rules are those of torch 2.13: c10/core/AllocatorConfig.h, c10/cuda/CUDAAllocatorConfig.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    """Of no effect where `memory_fraction` is not set, and together they are refused."""
    roundup_divisions: int = 0
    """Divisions between two powers of two; 0 rounds to 512."""
    large_segment: int = LARGE_SEGMENT
    memory_fraction: float | None = None
    """Share of the device that the process may use, where it is limited."""

    def rounded(self, size: int) -> int:
        """Return what an allocation of this size takes.

        >>> AllocatorSettings().rounded(1), AllocatorSettings().rounded(1025)
        (512, 1536)
        >>> AllocatorSettings(roundup_divisions=4).rounded(5000)
        5120
        """
        if size < MIN_BLOCK:
            return MIN_BLOCK
        if self.roundup_divisions > 1 and size > MIN_BLOCK * self.roundup_divisions:
            return _to_next_division(size, self.roundup_divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment_size(self, size: int) -> int:
        """Return the size of the segment that is asked of the device for a rounded size."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < MIN_LARGE:
            return self.large_segment
        return -(-size // ROUND_LARGE) * ROUND_LARGE


DEFAULT = AllocatorSettings()


def parse_settings(text: str) -> AllocatorSettings:
    """Return the settings that a text such as `expandable_segments:True` asks for.

    >>> parse_settings("expandable_segments:True,max_split_size_mb:128").max_split_size
    134217728
    """
    found: dict[str, Any] = {}
    for part in filter(None, "".join(text.split()).split(",")):
        key, colon, value = part.partition(":")
        if not (key and colon):
            raise UserError(
                f"PYTORCH_ALLOC_CONF={text!r} cannot be read; write key:value pairs with commas "
                "between"
            )
        if key == "backend" and value != "native":
            raise UserError(
                "PYTORCH_ALLOC_CONF: backend: CUDA's own allocator is not simulated; leave it out "
                "to plan for torch's"
            )
        if key in CONVERTERS:
            field, convert = CONVERTERS[key]
            found[field] = convert(key, value)
        elif key not in IGNORED:
            known = sorted(IGNORED | CONVERTERS.keys())
            raise UserError(f"PYTORCH_ALLOC_CONF: {unknown('setting', key, known)}")
    if {"garbage_collection_threshold", "memory_fraction"} <= found.keys():
        raise UserError(
            "PYTORCH_ALLOC_CONF: what garbage_collection_threshold gives back under a "
            "per_process_memory_fraction is not simulated; leave one of them out to plan"
        )
    return AllocatorSettings(**found)


def settings_of_environment(variables: Mapping[str, str]) -> AllocatorSettings:
    """Return the settings that a process with these environment variables starts with."""
    for name in VARIABLES:
        if variables.get(name):
            return parse_settings(variables[name])
    return DEFAULT


def _to_next_division(size: int, divisions: int) -> int:
    """Return the next of the equal divisions between two powers of two."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    division = floor >> (divisions.bit_length() - 1)
    return -(-size // division) * division if division else floor << 1


def _flag(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise UserError(f"PYTORCH_ALLOC_CONF: {key}:{value}; give True or False")
    return value == "True"


def _number(key: str, value: str, least: float, most: float = float("inf")) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        bounds = f"at least {least:g}" + ("" if most == float("inf") else f" and at most {most:g}")
        raise UserError(f"PYTORCH_ALLOC_CONF: {key}:{value}; give a number, {bounds}")
    return number


def _mebibytes(least: int) -> Callable[[str, str], int]:
    return lambda key, value: int(_number(key, value, least)) * MIB


def _share(key: str, value: str) -> float:
    return _number(key, value, 1e-9, 1.0)


def _power(key: str, value: str) -> int:
    if value.startswith("["):
        raise UserError(
            f"PYTORCH_ALLOC_CONF: {key} that differ by size are not simulated; give one number"
        )
    number = int(value) if value.isdigit() else -1
    if number < 0 or number & (number - 1):
        raise UserError(f"PYTORCH_ALLOC_CONF: {key}: {value} is no power of two")
    return number


CONVERTERS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _flag),
    "max_split_size_mb": ("max_split_size", _mebibytes(21)),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes(21)),
    "large_segment_size_mb": ("large_segment", _mebibytes(1)),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "per_process_memory_fraction": ("memory_fraction", _share),
    "roundup_power2_divisions": ("roundup_divisions", _power),
}
"""Keys that change what the simulation does, each with its field. torch refuses max_split_size_mb
of 20 and less."""
