"""The input pipeline's diagnosis: what each leg costs a sample, and the cores it takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STAGES = (
    *("read", "decode", "tokenise", "resize", "transform", "normalise", "python"),
    *("collate", "transport", "copy"),
)
"""Legs of a sample, in the order in which it passes them."""
LEVERS: Mapping[str, tuple[str, ...]] = {
    "read": ("ram_cache", "read_ahead", "packed_data", "block_order"),
    "decode": ("region_decode", "fast_decode", "ram_cache", "packed_data", "scaled_decode"),
    "tokenise": ("pretokenized", "ram_cache"),
    "resize": ("fast_resize", "ram_cache"),
    "transform": ("device_preprocess", "ram_cache"),
    "normalise": ("device_preprocess", "ram_cache"),
    "python": ("ram_cache", "device_cache"),
    "collate": ("device_preprocess", "device_cache"),
    "transport": ("device_preprocess", "device_cache"),
    "copy": ("pinned_memory", "device_prefetch", "device_cache"),
}
"""Techniques that take a leg away or make it cheaper, the mildest first."""
PACKING = "packed_data"
"""Reads the samples from a packed store, which has to be made first: `flatout pack`."""
ASKED = frozenset({PACKING, "block_order", "scaled_decode"})
"""Levers that `flatout tune` does not try by itself: they need a store, or the user's consent to
other numbers (`--numerics training`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One leg of a sample's way, measured alone and beside nothing."""

    name: str
    """One of `STAGES`; `python` is the data set's own code and what is not told apart."""
    cpu_ms: float
    """CPU time of one sample on one core."""
    share: float
    """`cpu_ms` over that of all stages."""
    wait_ms: float = 0.0
    """Time blocked, which takes a worker and no core."""
    bytes: float | None = None
    """Bytes of one sample that the leg handles; None where they are not known."""
    levers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """All legs of one sample, and what they mean for the cores."""

    stages: tuple[Stage, ...]
    samples: int
    """Samples that were looked at."""
    cpu_ms: float
    """CPU time of one sample over all stages."""
    samples_per_s: float
    """What one device takes when data is free."""
    cores_needed: float
    """Cores that make so many samples."""
    usable_cores: float
    """Cores that there are for it: those of this process, over the ranks on the host."""
    missing: Mapping[str, str] = field(default_factory=dict)
    is_repeated: bool | None = None
    """Whether a sample is the same each time it is made; None where nobody looked."""

    @property
    def is_fed(self) -> bool:
        """Whether the cores that are there make enough samples for one device."""
        return self.cores_needed <= self.usable_cores

    def legs_of(self, lever: str) -> tuple[str, ...]:
        """Return the names of the stages that a lever takes away or makes cheaper."""
        return tuple(stage.name for stage in self.stages if lever in stage.levers)

    def cores_without(self, lever: str) -> float:
        """Return the cores that are needed once a lever took the whole of its stages away.

        A bound: a lever that makes a stage cheaper leaves some of it.
        """
        left = sum(stage.cpu_ms for stage in self.stages if lever not in stage.levers)
        return self.cores_needed * left / self.cpu_ms if self.cpu_ms else 0.0


def pipeline_from_json(plain: Mapping[str, Any]) -> Pipeline:
    """Return the pipeline that `dataclasses.asdict` wrote."""
    stages = tuple(Stage(**item | {"levers": tuple(item["levers"])}) for item in plain["stages"])
    return Pipeline(**{**plain, "stages": stages})
