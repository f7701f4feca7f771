"""How well a training is fed: what it takes, what free data would give, what the cores can make."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FREE_DATA, CORES = "free_data", "cores"
"""What can bind: a step without any wait, or the cores that make the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """Rates of one recipe in samples a second, each measured or from measured CPU times."""

    samples_per_s: float
    free_data_per_s: float
    """With batches that were made before, the rest as in this recipe: other recipes train faster
    or slower than that."""
    cores_per_s: float
    """What the usable cores can make and train with this recipe, were none of them ever idle."""
    decode_per_s: float | None = None
    """The same, did making a sample take nothing but reading and decoding; None where it decodes
    nothing."""
    made_ms: float = 0.0
    """CPU time to make and send one sample."""
    trained_ms: float = 0.0
    """CPU time of training on one sample where the training runs on the same cores, else 0."""

    @property
    def binds(self) -> str:
        """Which of the two limits is the lower one."""
        return FREE_DATA if self.free_data_per_s <= self.cores_per_s else CORES

    @property
    def measured_limit_per_s(self) -> float:
        """The lower one of the two limits, as it was measured apart from the recipe's own rate."""
        return min(self.free_data_per_s, self.cores_per_s)

    @property
    def limit_per_s(self) -> float:
        """The limit, which is no lower than what was reached: a run refutes what it exceeds."""
        return max(self.samples_per_s, self.measured_limit_per_s)

    @property
    def share(self) -> float:
        """The rate over its limit, in [0, 1].

        >>> Feeding(samples_per_s=95, free_data_per_s=200, cores_per_s=100).share
        0.95
        >>> Feeding(samples_per_s=102, free_data_per_s=200, cores_per_s=100).share
        1.0
        """
        return self.samples_per_s / self.limit_per_s if self.limit_per_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a plain JSON mapping."""
        return asdict(self) | {"binds": self.binds, "share": self.share}


def feeding_from_json(plain: Mapping[str, Any]) -> Feeding:
    """Return the record that `Feeding.to_json` wrote."""
    return Feeding(**{k: v for k, v in plain.items() if k not in ("binds", "share")})
