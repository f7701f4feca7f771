"""What of a step that was traced on one device the ranks of a spread training have.

The repeated blocks of the model are found by the names of their parameters; a stage of a pipeline
has some of them, a rank of a tensor-parallel group a part of each.
"""

import copy
import math
import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from flatout.analysis import stream_changes
from flatout.parallel.cost import Work
from flatout.records.memory_stream import Allocation, Component, MemoryStream, Phase
from flatout.records.parallel import ParallelSpec

BLOCK = re.compile(r"^(.*?)\.?(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the repeated blocks of a model are."""

    prefix: str | None
    """Of their names, which may be empty; None where there are no blocks."""
    blocks: int
    share: float = 0.0
    """Of the parameters' bytes."""
    widths: frozenset[int] = frozenset()
    """Sizes of their weights' dims: a split has to divide them."""
    boundary_bytes: int = 0
    """What one block hands to the next, of the traced batch."""
    numbers: tuple[int, ...] = ()
    """The blocks' own in their names: a list may have other layers between them."""
    first: frozenset[str] = frozenset()
    """Modules outside the blocks that run before them."""

    def number(self, module: str) -> int | None:
        """Return the place of the block that a module is in or right behind; None outside."""
        if self.prefix is None:
            return None
        start = f"{self.prefix}." if self.prefix else ""
        head = module.removeprefix(start).partition(".")[0]
        if not (module.startswith(start) and head.isdigit()):
            return None
        return max(0, bisect_right(self.numbers, int(head)) - 1)


def layout_of(stream: MemoryStream) -> Layout:
    """Return where the blocks of a stream's model are: the list with most parameter bytes."""
    parameters = [a for a in stream.allocations if a.component is Component.PARAMETERS]
    whole = sum(a.size for a in parameters) or 1
    lists: dict[str, dict[int, int]] = {}
    for allocation in parameters:
        found = BLOCK.match(allocation.module)
        if found:
            sizes = lists.setdefault(found[1], {})
            sizes[int(found[2])] = sizes.get(int(found[2]), 0) + allocation.size
    repeated = {
        prefix: sizes
        for prefix, sizes in lists.items()
        if len(sizes) > 1 and max(sizes.values()) <= 2 * min(sizes.values())
    }
    if not repeated:
        return Layout(prefix=None, blocks=1)
    prefix = max(repeated, key=lambda name: sum(repeated[name].values()))
    sizes = repeated[prefix]
    layout = Layout(
        prefix=prefix,
        blocks=len(sizes),
        share=sum(sizes.values()) / whole,
        numbers=tuple(sorted(sizes)),
    )
    weights = [a for a in parameters if layout.number(a.module) is not None and len(a.shape) > 1]
    last = stream.steps - 1
    made = [
        a
        for a in stream.allocations
        if a.step == last and a.phase is Phase.FORWARD and a.component is not Component.PARAMETERS
    ]
    by_first = [a.size for a in made if layout.number(a.module) == 0]
    before = takewhile(lambda a: layout.number(a.module) is None, made)
    return replace(
        layout,
        widths=frozenset(dim for weight in weights for dim in weight.shape),
        boundary_bytes=by_first[-1] if by_first else 0,
        first=frozenset(a.module for a in before),
    )


FIRST, LAST = -1, -2
"""Places of what is outside the blocks: before the first, and after the last."""


class StreamColumns:
    """A stream as arrays, of which any rank's part is cut: a search does that hundreds of times."""

    def __init__(self, stream: MemoryStream, layout: Layout) -> None:
        rows = stream.allocations
        self.batch, self.flops, self.layout = stream.batch or 1, stream.model_flops, layout
        self.sizes = np.array([row.size for row in rows], dtype=float)
        self.places = np.array([_place(row, layout) for row in rows])
        self.parts = np.array([_COMPONENTS[row.component] for row in rows])
        self.is_optimizer = np.array([row.phase is Phase.OPTIMIZER for row in rows])
        self.is_second_copy = np.zeros(len(rows), dtype=bool)
        self.is_second_copy[stream_changes.second_copies(stream)] = True
        last = stream.steps - 1
        self.is_made = np.array([r.step == last and r.phase is not Phase.SETUP for r in rows])
        self.events = np.array([event.index for event in stream.events])
        self.signs = np.array([1 if event.born else -1 for event in stream.events])
        weights = [row.component is Component.PARAMETERS for row in rows]
        self.parameters = float(self.sizes[weights].sum())
        self.gradients = float(stream_changes.gradient_bytes(stream)) or self.parameters
        self.numbers = np.array(
            [math.prod(r.shape) if w else 0 for w, r in zip(weights, rows, strict=True)]
        )
        is_head = [w and len(r.shape) > 1 for w, r in zip(weights, rows, strict=True)]
        # An embedding is looked up, so what is multiplied outside the blocks is after them.
        head = float(self.sizes[is_head & (self.places == LAST)].sum())
        inside = layout.share * self.parameters
        self.head_share = (
            head / (head + inside) if layout.prefix is not None and head + inside else 0.0
        )
        self.gathered_root, self.gathered_blocks = stream_changes.gathered_bytes(stream)

    def at(self, stream: MemoryStream) -> "StreamColumns":
        """Return those of the same step at another batch, in which only sizes differ."""
        other = copy.copy(self)
        other.batch, other.flops = stream.batch or 1, stream.model_flops
        other.sizes = np.array([row.size for row in stream.allocations], dtype=float)
        return other

    def held(self, spec: ParallelSpec, stage: int) -> Any:
        """Return which allocations a stage of the pipeline makes."""
        if spec.pp == 1:
            return np.ones(len(self.sizes), dtype=bool)
        owners = self.places * spec.pp // self.layout.blocks
        owners = np.where(self.places == FIRST, 0, owners)
        return np.where(self.places == LAST, spec.pp - 1, owners) == stage

    def split(self, spec: ParallelSpec) -> Any:
        """Return the part of each allocation that a rank of a tensor-parallel group has.

        Embedding and head stay whole: only plans that say so split them too.
        """
        return np.where(self.places >= 0, 1 / spec.tp, 1.0)

    def peak_bytes(self, spec: ParallelSpec, stage: int, in_flight: int) -> float:
        """Return the most that a stage's rank has allocated; it holds so many microbatches."""
        factors = self.held(spec, stage) * self.split(spec)
        factors = np.where(self.parts == _COMPONENTS[Component.ACTIVATIONS], in_flight, 1) * factors
        if spec.engine != "ddp":
            factors = np.where(self.is_second_copy, 0.0, factors)
        shards = math.inf if spec.offload else spec.dp_shard  # the host has all of it
        for component, stage_of_zero in _ZERO.items():
            if spec.zero >= stage_of_zero:
                sharded = self.parts == _COMPONENTS[component]
                factors = np.where(sharded, factors / shards, factors)
        if spec.zero:
            temporary = self.is_optimizer & (self.parts == _COMPONENTS[Component.TEMPORARIES])
            factors = np.where(temporary, factors / shards, factors)
        course = np.cumsum(self.signs * (self.sizes * factors)[self.events])
        gathered = self.gathered_root + self.gathered_blocks / spec.tp if spec.zero == 3 else 0.0
        return float(course.max(initial=0.0)) + gathered

    def work(self, spec: ParallelSpec, stage: int) -> Work:
        """Return what one microbatch takes the rank of a stage, without its exchanges."""
        held = self.held(spec, stage) & self.is_made & ~self.is_optimizer
        blocks = self.layout.blocks
        own = sum(block * spec.pp // blocks == stage for block in range(blocks)) / blocks
        inside = (1 - self.head_share) * self.flops * own
        head = self.head_share * self.flops if stage == spec.pp - 1 else 0.0
        return Work(
            flops=inside / spec.tp + head,
            moved_bytes=float((self.sizes * self.split(spec))[held].sum()),
            starts=float(held.sum()),
        )

    def stepped_on(self, spec: ParallelSpec) -> float:
        """Return the parameters that the optimizer of a rank steps on, on the fullest stage.

        Those that have gradients are taken to lie evenly among those that do not.
        """
        trained = self.gradients / (self.parameters or 1)
        shares = trained * self.numbers * self.split(spec) / spec.dp_shard
        return max(float(shares[self.held(spec, stage)].sum()) for stage in range(spec.pp))


_COMPONENTS = {component: number for number, component in enumerate(Component)}
_ZERO = {Component.OPTIMIZER: 1, Component.GRADIENTS: 2, Component.PARAMETERS: 3}
"""From which stage of ZeRO on the ranks share it out."""


def _place(allocation: Allocation, layout: Layout) -> int:
    block = layout.number(allocation.module)
    if block is not None:
        return block
    is_first = allocation.module in layout.first or allocation.component is Component.INPUTS
    return FIRST if is_first else LAST
