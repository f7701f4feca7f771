"""What would make a step's products faster: foreseen from the roofline, then timed. Pure.

Three kinds of change. `pad`: a size that is no multiple of what the hardware fetches at once, made
one (a vocabulary of 50257 to 50304). `precision`: products in fp32 where the device multiplies
something shorter much faster. `batch`: products with so few rows that memory decides, with twice as
many rows. `plan` says what to time, `advised` what came out of it.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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


Calls = Mapping[int, Mapping[str, Any]]
"""Changed calls by the place of the product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change and the calls that it makes of others."""

    advice: ProductAdvice
    """As far as it is foreseen."""
    work: float
    """How much more work the changed calls do for the training: 2 for twice the batch."""
    calls: Calls


def plan(rows: Sequence[Seen], ceilings: DeviceCeilings) -> tuple[Change, ...]:
    """Return what is worth timing, the most promising first."""
    timed = {place: row for place, row in enumerate(rows) if row.product.ms is not None}
    if not timed:
        return ()
    least_ms = LEAST_SHARE * _step_ms(timed, timed)
    found = [*_pads(timed, ceilings), *_precisions(timed, ceilings), *_batches(timed, ceilings)]
    worth = [change for change in found if _step_ms(change.calls, timed) >= least_ms]

    def promised_ms(change: Change) -> float:
        return _step_ms(change.calls, timed) * (1 - 1 / max(change.advice.predicted_ratio, 1e-9))

    return tuple(sorted(worth, key=promised_ms, reverse=True)[:MOST_ADVICE])


def advised(
    change: Change, rows: Sequence[Seen], times: Mapping[int, tuple[float, float]]
) -> ProductAdvice:
    """Return the advice with its measured gain."""
    if set(times) != set(change.calls):
        return change.advice
    counts = {place: rows[place].product.count for place in change.calls}
    before_ms = sum(counts[place] * before for place, (before, _) in times.items())
    after_ms = sum(counts[place] * after for place, (_, after) in times.items()) / change.work
    now_ms = _step_ms(change.calls, dict(enumerate(rows)))
    return replace(
        change.advice,
        measured_ratio=before_ms / after_ms,
        saved_ms=now_ms * (1 - after_ms / before_ms),
    )


def _step_ms(places: Iterable[int], rows: Mapping[int, Seen]) -> float:
    return sum(rows[place].product.step_ms or 0.0 for place in places)


def _pads(rows: Mapping[int, Seen], ceilings: DeviceCeilings) -> list[Change]:
    sizes = sorted({size for row in rows.values() for size in _odd_sizes(row.product, ceilings)})
    found = []
    for size in sizes:
        padded = math.ceil(size / PAD_TO) * PAD_TO
        calls = _resized(rows, size, padded)
        if calls and padded <= size * (1 + MOST_PADDED_SHARE):
            what = words("roofline.pad", old=str(size), new=str(padded))
            found.append(_change("pad", what, calls, rows, ceilings))
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
    found = [
        _change(
            "batch",
            words("roofline.rows", old=str(size), new=str(2 * size)),
            _resized(rows, size, 2 * size),
            rows,
            ceilings,
        )
        for size in sorted(few)
    ]
    return [change for change in found if change.advice.predicted_ratio >= LEAST_BATCH_GAIN]


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
            what = words("roofline.recast", dtype=dtype, other=other)
            found.append(_change("precision", what, calls, rows, ceilings))
    return found


def _resized(rows: Mapping[int, Seen], old: int, new: int) -> Calls:
    """Return the calls of every product that has a size, with another one."""
    changed = {place: resized(row.call, {old: new}) for place, row in rows.items()}
    return {place: call for place, call in changed.items() if call is not None}


def _change(
    kind: str, what: str, calls: Calls, rows: Mapping[int, Seen], ceilings: DeviceCeilings
) -> Change:
    """Return a change with how many times as fast it should be, for the same work.

    A changed call is taken to come as near to its roof as the call it replaces; a padded one as
    what is typical where that is nearer.
    """
    work = 2.0 if kind == "batch" else 1.0
    typical = _typical(rows, ceilings) if kind == "pad" else 0.0
    now_ms = later_ms = 0.0
    for place, call in calls.items():
        product = rows[place].product
        after = product_of(call, product.count).least_ms(ceilings)
        share = roof_share(product, ceilings)
        if after is None or not share:
            continue
        now_ms += product.step_ms or 0.0
        later_ms += after / max(share, typical)
    ratio = work * now_ms / later_ms if later_ms else 1.0
    advice = ProductAdvice(kind=kind, what=what, products=tuple(calls), predicted_ratio=ratio)
    return Change(advice=advice, work=work, calls=calls)


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
