"""Arithmetic with spans of time on one line. Pure."""

from bisect import bisect_right
from collections.abc import Iterable

Span = tuple[float, float]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union as spans that do not touch, in order.

    >>> merged([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)])
    [(0.0, 2.0), (3.0, 4.0)]
    """
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def length(spans: Iterable[Span]) -> float:
    """Return the total length of spans that do not overlap.

    >>> length([(0.0, 2.0), (3.0, 4.0)])
    3.0
    """
    return sum(stop - start for start, stop in spans)


def without(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    """Return the parts of the spans that no span of `taken` covers.

    >>> without([(0.0, 4.0)], [(1.0, 2.0), (3.0, 9.0)])
    [(0.0, 1.0), (2.0, 3.0)]
    """
    cuts = merged(taken)
    ends = [stop for _, stop in cuts]
    left: list[Span] = []
    for start, stop in merged(spans):
        reached = start
        place = bisect_right(ends, start)
        while place < len(cuts) and cuts[place][0] < stop:
            if cuts[place][0] > reached:
                left.append((reached, cuts[place][0]))
            reached = cuts[place][1]
            place += 1
        if reached < stop:
            left.append((reached, stop))
    return left


def clipped(spans: Iterable[Span], window: Span) -> list[Span]:
    """Return the parts of the spans inside a window.

    >>> clipped([(0.0, 2.0), (5.0, 6.0)], (1.0, 3.0))
    [(1.0, 2.0)]
    """
    first, last = window
    inside = ((max(start, first), min(stop, last)) for start, stop in spans)
    return [(start, stop) for start, stop in inside if start < stop]
