"""What one traced training step allocates: the record between the tracer and the allocator."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Component(Enum):
    """What an allocation is for, as the plan names it."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    """Made in a forward and alive when its backward starts."""
    INPUTS = "inputs"
    TEMPORARIES = "temporaries"
    WORKSPACE = "workspace"
    """cuBLAS, cuDNN and the buffers that kernels take inside: never seen by a tracer."""


class Phase(Enum):
    """Where in a step an allocation was made."""

    SETUP = "setup"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One storage on the traced device, from its birth to its death."""

    size: int
    """Bytes as asked for; the allocator rounds."""
    component: Component
    phase: Phase
    step: int
    """Optimizer step it was born in, from 0; setup belongs to step 0."""
    operator: str = ""
    """The operator that made it, as `aten.addmm.default`."""
    module: str = ""
    """Dotted name of the module that was running, empty outside the root."""
    line: str = ""
    """`file.py:line`, innermost line outside torch; empty if unknown."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stream: int = 0
    used_on: tuple[int, ...] = ()
    """Other streams that use it: it is not free before their work is done (`record_stream`)."""


class StreamEvent(NamedTuple):
    """The birth or the death of an allocation."""

    index: int  # type: ignore[assignment]  # tuples have a method of that name
    """Position in `MemoryStream.allocations`."""
    born: bool
    """False when it dies here."""


class Mark(NamedTuple):
    """From this event on the training is in this phase of this step."""

    at: int
    """Position in `MemoryStream.events`."""
    phase: Phase
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStream:
    """All allocations of the traced steps in the order in which they happened."""

    allocations: tuple[Allocation, ...]
    events: Sequence[StreamEvent]
    marks: tuple[Mark, ...]
    device: str
    """`cuda` (virtual or real) or `cpu`."""
    method: str
    """How it was traced: `virtual_cuda`, `cuda_fake`, `cpu_fake`, `real`."""
    steps: int
    batch: int | None = None
    """Samples per micro-batch, where it is known."""
    model_flops: float = 0.0
    """Of the last traced step, forward and backward, by torch's own counting; 0 if unknown."""
    compiled_kept_bytes: int | None = None
    """What a compiled step keeps for backward, by AOTAutograd's partition; None where nothing is
    compiled or it could not be found. The stream itself is that of eager code."""
    eager_kept_bytes: int | None = None
    """What the traced, eager code of the same part keeps, where the above was found."""
    notes: tuple[str, ...] = ()
    """What could not be traced and what was assumed instead, one clause each."""

    def alive(self) -> list[int]:
        """Return the allocated bytes after every event, unrounded."""
        total, course = 0, []
        for event in self.events:
            size = self.allocations[event.index].size
            total += size if event.born else -size
            course.append(total)
        return course
