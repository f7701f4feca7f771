"""What the memory did over one step."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAtPeak:
    """A tensor that was alive when memory was highest."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    line: str
    """Where it was made: `file.py:line`, the innermost line outside torch; empty if unknown."""
    phase: str
    module: str = ""
    """Dotted name of the module that made it, empty outside the root."""
    kind: str = ""
    """`parameter`, `buffer`, `gradient`, `optimizer state`; empty for what a step makes."""
    operator: str = ""
    """The operator that made it, where a plan was traced; empty where it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStory:
    """Tensor memory of the device over a step; on the CPU torch's own allocations."""

    peak_bytes: int
    """Largest number of allocated bytes at any moment of the observed steps."""
    peak_phase: str
    by_phase: Mapping[str, int]
    """Largest number of allocated bytes while each phase ran."""
    by_module: Mapping[str, int]
    """Bytes alive at the peak by the module that made them, the largest first."""
    largest: tuple[TensorAtPeak, ...] = ()
    timeline: tuple[tuple[float, int], ...] = ()
    """Milliseconds since the step's start and allocated bytes, of one step."""
    leak_bytes_per_step: float = 0.0
    """Slope of what is left allocated at the end of the steps; 0 unless nearly all later steps
    leave more, and allocations of earlier steps that still live make up most of it."""
    leak_by_line: Mapping[str, float] = field(default_factory=dict)
    """Bytes that each step leaves behind, by the line that made them."""
    kept_graph_nodes_per_step: float = 0.0
    """Autograd nodes that each step leaves behind: a kept loss keeps all of its past."""
    kept_graph_names: tuple[str, ...] = ()
    """Variables of the running functions that hold such graphs."""
    steps: int = 0
    reserved_bytes: int | None = None
    fragmentation_share: float | None = None
    """Share of the reserved memory that no tensor used at the peak."""
    allocation_retries: int | None = None
    snapshot: str | None = None
    """Path of torch's memory snapshot, on a GPU and on demand."""
