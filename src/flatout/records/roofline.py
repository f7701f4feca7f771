"""A Roofline: what a device can do at most, and what each matrix product of a step gets of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.records.json_records import to_plain

SCHEMA = "flatout.roofline/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCeilings:
    """Measured rates of one device: nothing on it goes faster."""

    device_kind: str
    device_name: str
    threads: int
    """Threads of the CPU that took part."""
    gemm_flops_per_s: Mapping[str, float]
    """Of a large square product of normal random numbers, by its arithmetic."""
    memory_bytes_per_s: float
    """Read plus written, of a copy within the device's memory or a triad, whichever is faster."""
    copy_bytes_per_s: float
    triad_bytes_per_s: float
    """Of `a = b + s * c`."""
    to_device_bytes_per_s: float | None = None
    """From pinned host memory; None where the device is the CPU."""
    from_device_bytes_per_s: float | None = None
    processors: int | None = None
    """Streaming multiprocessors of a GPU."""
    is_sound: bool = True
    """Whether no one else used the cores meanwhile."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Arithmetic that could not be measured, each with the reason."""

    def ridge(self, dtype: str) -> float:
        """Return the operations per byte above which products, and no longer memory, decide."""
        return self.gemm_flops_per_s[dtype] / self.memory_bytes_per_s

    def reachable(self, dtype: str, intensity: float) -> float | None:
        """Return the most operations per second at an intensity; None where it is not known."""
        peak = self.gemm_flops_per_s.get(dtype)
        return None if peak is None else min(peak, intensity * self.memory_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One distinct matrix product of a training step, all its calls together."""

    operator: str
    m: int
    n: int
    k: int
    batch: int
    """Products in one call; the groups of a convolution or of rows."""
    dtype: str
    """The arithmetic, such as `float32`, `tf32`, `bfloat16` and `float8_e4m3fn`."""
    layout: str
    """How the operands lie: `N` by rows, `T` by columns, `S` neither; of a convolution `channels
    first` or `last`."""
    role: str
    """`forward`, `dgrad` (gradient of an input), `wgrad` (of a weight), `both`, or `again` for
    what activation checkpointing computes once more."""
    count: float
    """Calls in one step."""
    flops: int
    """Of one call, two for each multiplication with addition."""
    bytes: int
    """Of one call: every operand read once, the result written once."""
    aligned_bytes: int
    """Largest power of two, up to 128, that divides every row the hardware has to fetch."""
    ms: float | None = None
    """One call alone, operands not in the caches; None where it was not timed."""
    n_timed: int = 0
    why: str = ""
    tile_share: float | None = None
    """Useful part of the tiles that cover the result; GPU only."""
    wave_share: float | None = None
    """Useful part of the last and all other waves of tiles; GPU only."""

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float | None:
        """What it reaches alone."""
        return None if self.ms is None else 1e3 * self.flops / self.ms

    @property
    def step_ms(self) -> float | None:
        """All its calls of one step, each as long as alone."""
        return None if self.ms is None else self.count * self.ms

    def least_ms(self, ceilings: DeviceCeilings) -> float | None:
        """Return what all its calls of one step take at the roof."""
        rate = ceilings.reachable(self.dtype, self.intensity)
        return None if not rate else 1e3 * self.count * self.flops / rate

    def recoverable_ms(self, ceilings: DeviceCeilings) -> float | None:
        """Return what a step would save were every call at the roof."""
        least_ms = self.least_ms(ceilings)
        if self.step_ms is None or least_ms is None:
            return None
        return max(0.0, self.step_ms - least_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductAdvice:
    """One change of sizes or arithmetic, foreseen and then timed."""

    kind: str
    """`pad`, `precision` or `batch`."""
    what: str
    """One sentence: what to change."""
    products: tuple[int, ...]
    """The products it changes, as places in `Roofline.products`."""
    predicted_ratio: float
    """How many times as fast those products should become, for the same work."""
    measured_ratio: float | None = None
    """How many times as fast they are, alone and in turn with what they are now."""
    saved_ms: float | None = None
    """What a step saves by the measured ratio; below zero it costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A device, and the products of a step on it."""

    ceilings: DeviceCeilings
    workload: str = ""
    step_ms: float | None = None
    products: tuple[Product, ...] = ()
    """The most of the step first."""
    advice: tuple[ProductAdvice, ...] = ()
    attention_flops: float = 0.0
    """Operations of fused attention in a step: products too, but not told apart."""
    notes: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)

    def share(self, product: Product) -> float | None:
        """Return the part of the step that a product takes."""
        if product.step_ms is None or not self.step_ms:
            return None
        return product.step_ms / self.step_ms

    @property
    def products_ms(self) -> float:
        """All timed products of one step."""
        return sum(product.step_ms or 0.0 for product in self.products)

    @property
    def recoverable_ms(self) -> float:
        """What a step would save were all products at the roof."""
        return sum(product.recoverable_ms(self.ceilings) or 0.0 for product in self.products)

    def to_json(self) -> dict[str, Any]:
        """Return the `flatout.roofline/1` mapping."""
        plain = to_plain(self)
        plain["ceilings"]["ridge"] = {
            dtype: self.ceilings.ridge(dtype) for dtype in self.ceilings.gemm_flops_per_s
        }
        for product, row in zip(self.products, plain["products"], strict=True):
            row |= {
                "intensity": product.intensity,
                "flops_per_s": product.flops_per_s,
                "reachable_flops_per_s": self.ceilings.reachable(product.dtype, product.intensity),
                "step_ms": product.step_ms,
                "share": self.share(product),
                "recoverable_ms": product.recoverable_ms(self.ceilings),
            }
        totals = {"products_ms": self.products_ms, "recoverable_ms": self.recoverable_ms}
        return {"schema": SCHEMA} | plain | totals
