"""What would make a step's products faster: foreseen from the roofline, then timed. Pure.

Three kinds of change. `pad`: a size that is no multiple of what the hardware fetches at once, made
one (a vocabulary of 50257 to 50304). `precision`: products in fp32 where the device multiplies
something shorter much faster. `batch`: products with so few rows that memory decides, with twice as
many rows. `plan` says what to time, `advised` what came out of it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.analysis.products import (
    ELEMENT_BYTES,
    TENSOR_CORE_BYTES,
    Seen,
    product_of,
    recast,
    resized,
)
from flatout.records.messages import words
from flatout.records.roofline import DeviceCeilings, Product, ProductAdvice

PAD_TO = 64
"""Sizes are padded to multiples of it: a cache line of 2-byte numbers is half of that, a tile of
tensor cores divides it; 50304 is the multiple of it that GPT-2's vocabulary is padded to."""
MOST_PADDED_SHARE = 0.04
"""Padding that adds more than this to a product's operations is not worth its zeros."""
LEAST_SHARE = 0.01
"""Changes that touch a smaller part of all products are left out."""
LEAST_FASTER = 1.5
"""Arithmetic that is not this much faster on the device is not worth its rounding."""
LEAST_BATCH_GAIN = 1.1
"""A larger batch is proposed only where the roofline promises at least this."""
MOST_ADVICE = 6
"""Pieces of advice that are timed; the most promising."""
CPU_LINE_BYTES = 64
"""What a CPU fetches at once."""
SHORTER = {"float32": ("tf32", "bfloat16"), "tf32": ("bfloat16",)}
"""What an arithmetic may be replaced by, the nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change and the calls that it makes of others."""

    kind: str
    what: str
    work: float
    """How much more work the changed calls do for the training: 2 for twice the batch."""
    calls: Mapping[int, Mapping[str, Any]]
    """The changed call, by the place of the product."""
    predicted_ratio: float


def plan(rows: Sequence[Seen], ceilings: DeviceCeilings) -> tuple[Change, ...]:
    """Return what is worth timing, the most promising first."""
    timed = {place: row for place, row in enumerate(rows) if row.product.ms is not None}
    if not timed:
        return ()
    whole_ms = sum(row.product.step_ms or 0.0 for row in timed.values())
    found = [*_pads(timed, ceilings), *_precisions(timed, ceilings), *_batches(timed, ceilings)]
    worth = [
        change
        for change in found
        if sum(timed[place].product.step_ms or 0.0 for place in change.calls)
        >= LEAST_SHARE * whole_ms
    ]
    worth.sort(key=lambda change: -_promised_ms(change, timed))
    return tuple(worth[:MOST_ADVICE])


def advised(
    change: Change, rows: Sequence[Seen], times: Mapping[int, tuple[float, float]]
) -> ProductAdvice:
    """Return the advice with its measured gain."""
    counts = {place: rows[place].product.count for place in change.calls}
    measured = saved_ms = None
    if set(times) == set(change.calls):
        before_ms = sum(counts[place] * before for place, (before, _) in times.items())
        after_ms = sum(counts[place] * after for place, (_, after) in times.items()) / change.work
        measured = before_ms / after_ms
        now_ms = sum(rows[place].product.step_ms or 0.0 for place in change.calls)
        saved_ms = now_ms * (1 - 1 / measured)
    return ProductAdvice(
        kind=change.kind,
        what=change.what,
        products=tuple(change.calls),
        predicted_ratio=change.predicted_ratio,
        measured_ratio=measured,
        saved_ms=saved_ms,
    )


def _pads(rows: Mapping[int, Seen], ceilings: DeviceCeilings) -> list[Change]:
    sizes = sorted({size for row in rows.values() for size in _odd_sizes(row.product, ceilings)})
    found = []
    for size in sizes:
        padded = math.ceil(size / PAD_TO) * PAD_TO
        change = _changed("pad", rows, ceilings, {size: padded}, 1.0)
        if change is not None and padded <= size * (1 + MOST_PADDED_SHARE):
            found.append(change)
    return found


def _odd_sizes(product: Product, ceilings: DeviceCeilings) -> list[int]:
    """Return the sizes whose rows are not fetched at full width."""
    if product.operator.startswith("convolution"):
        return []
    line = CPU_LINE_BYTES if ceilings.device_kind == "cpu" else TENSOR_CORE_BYTES
    width = ELEMENT_BYTES[product.dtype]
    return [size for size in (product.m, product.n, product.k) if size * width % line]


def _batches(rows: Mapping[int, Seen], ceilings: DeviceCeilings) -> list[Change]:
    """Propose more rows where forward products are bound by memory."""
    few = {
        row.product.m
        for row in rows.values()
        if row.product.role == "forward"
        and row.product.batch == 1
        # Only where the rows are few, not where the layer is.
        and row.product.m < min(row.product.n, row.product.k)
    }
    found = [_changed("batch", rows, ceilings, {size: 2 * size}, 2.0) for size in sorted(few)]
    return [c for c in found if c is not None and c.predicted_ratio >= LEAST_BATCH_GAIN]


def _precisions(rows: Mapping[int, Seen], ceilings: DeviceCeilings) -> list[Change]:
    peaks = ceilings.gemm_flops_per_s
    found = []
    for dtype, others in SHORTER.items():
        chosen = {place: row for place, row in rows.items() if row.product.dtype == dtype}
        faster = [
            other
            for other in others
            if dtype in peaks and peaks.get(other, 0.0) >= LEAST_FASTER * peaks[dtype]
        ]
        for other in faster if chosen else ():
            calls = {place: recast(row.call, other) for place, row in chosen.items()}
            found.append(
                Change(
                    kind="precision",
                    what=words("roofline.recast", dtype=dtype, other=other),
                    work=1.0,
                    calls=calls,
                    predicted_ratio=_predicted(chosen, calls, ceilings, 1.0),
                )
            )
    return found


def _changed(
    kind: str,
    rows: Mapping[int, Seen],
    ceilings: DeviceCeilings,
    change: Mapping[int, int],
    work: float,
) -> Change | None:
    """Return the change of one size in every product that has it."""
    calls = {
        place: call
        for place, row in rows.items()
        if (call := resized(row.call, change)) is not None
    }
    if not calls:
        return None
    (old, new), *_ = change.items()
    typical = _typical(rows, ceilings) if kind == "pad" else 0.0
    name = "roofline.pad" if kind == "pad" else "roofline.rows"
    return Change(
        kind=kind,
        what=words(name, old=str(old), new=str(new)),
        work=work,
        calls=calls,
        predicted_ratio=_predicted(rows, calls, ceilings, work, typical),
    )


def _predicted(
    rows: Mapping[int, Seen],
    calls: Mapping[int, Mapping[str, Any]],
    ceilings: DeviceCeilings,
    work: float,
    typical: float = 0.0,
) -> float:
    """Return how many times as fast the changed products should be, for the same work.

    A changed call is taken to come as near to its roof as the call it replaces, or as what is
    typical where that is nearer.
    """
    now_ms = later_ms = 0.0
    for place, call in calls.items():
        product = rows[place].product
        after = product_of(call, product.count).least_ms(ceilings)
        share = roof_share(product, ceilings)
        if after is None or not share:
            continue
        now_ms += product.step_ms or 0.0
        later_ms += after / max(share, typical)
    return work * now_ms / later_ms if later_ms else 1.0


def roof_share(product: Product, ceilings: DeviceCeilings) -> float | None:
    """Return how near a product comes to its roof; None where it was not timed."""
    least_ms, step_ms = product.least_ms(ceilings), product.step_ms
    return least_ms / step_ms if least_ms and step_ms else None


def _typical(rows: Mapping[int, Seen], ceilings: DeviceCeilings) -> float:
    """Return how near to the roof products come whose sizes are all even; 0 where there is none."""
    even = [
        share
        for row in rows.values()
        if not _odd_sizes(row.product, ceilings)
        and (share := roof_share(row.product, ceilings)) is not None
    ]
    return min(statistics.median(even), 1.0) if even else 0.0


def _promised_ms(change: Change, rows: Mapping[int, Seen]) -> float:
    """Return what a step may save."""
    now_ms = sum(rows[place].product.step_ms or 0.0 for place in change.calls)
    return now_ms * (1 - 1 / max(change.predicted_ratio, 1e-9))
