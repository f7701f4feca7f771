"""Unit constants and the formatters every report uses."""

import math

KIB = 1024
MIB = 1024**2
GIB = 1024**3


MAX_RATIO = 1_000.0
"""Ratios from here on are shown as more than this: no clock tells a thousandth of a step."""
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_bytes(count: float) -> str:
    """Render a byte count in the unit that suits it: nothing but zero is shown as zero.

    >>> format_bytes(3 * GIB), format_bytes(5 * MIB), format_bytes(77_000), format_bytes(22)
    ('3.00 GiB', '5.0 MiB', '75.2 KiB', '22 bytes')
    >>> format_bytes(0.2), format_bytes(1), format_bytes(0), format_bytes(-2 * MIB)
    ('<1 byte', '1 byte', '0 bytes', '-2.0 MiB')
    """
    size = abs(count)
    if size >= GIB:
        return f"{count / GIB:.2f} GiB"
    if size >= MIB:
        return f"{count / MIB:.1f} MiB"
    if size >= KIB:
        return f"{count / KIB:.1f} KiB"
    if 0 < size < 0.5:
        return "<1 byte"
    whole = f"{count:.0f}"
    return "1 byte" if whole == "1" else f"{whole} bytes"


def with_prefix(count: float) -> tuple[float, str]:
    """Return a count in the decimal unit that suits it, and the unit's prefix.

    >>> with_prefix(4.7e6), with_prefix(12.0)
    ((4.7, 'M'), (12.0, ''))
    """
    unit, prefix = next((pair for pair in PREFIXES if count >= pair[0]), (1.0, ""))
    return count / unit, prefix


def format_count(value: float, decimals: int = 1) -> str:
    """Render a number with fixed decimals; one too small for them is not shown as zero.

    >>> format_count(3.14), format_count(0.0), format_count(0.01), format_count(0.001, 2)
    ('3.1', '0.0', '<0.1', '<0.01')
    """
    least = 10.0**-decimals
    return f"<{least:.{decimals}f}" if 0 < value < least / 2 else f"{value:.{decimals}f}"


def format_ms(value_ms: float) -> str:
    """Render a time with three significant figures and the unit that suits it.

    >>> format_ms(212.41), format_ms(3.14159), format_ms(0.05), format_ms(12_300), format_ms(0)
    ('212 ms', '3.14 ms', '50.0 us', '12.3 s', '0 ms')
    """
    if value_ms == 0:
        return "0 ms"
    if value_ms >= 1_000:
        return f"{_three_figures(value_ms / 1_000)} s"
    if value_ms >= 1:
        return f"{_three_figures(value_ms)} ms"
    return f"{_three_figures(value_ms * 1_000)} us"


def format_duration(seconds: float) -> str:
    """Render a duration for people.

    >>> format_duration(7.2), format_duration(95), format_duration(3700)
    ('7 s', '1 min 35 s', '1 h 1 min')
    """
    if not math.isfinite(seconds):
        return f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_share(share: float) -> str:
    """Render a share in [0, 1] as percent.

    Neither none nor all is said of a share that is nearly that.

    >>> format_share(0.354), format_share(0.004), format_share(0.0001), format_share(0.0)
    ('35 %', '0.4 %', '<0.1 %', '0 %')
    >>> format_share(0.9963), format_share(0.99999), format_share(1.0)
    ('99.6 %', '>99.9 %', '100 %')
    """
    percent = 100 * share
    if 99.95 <= percent < 100 - 1e-6:
        return ">99.9 %"
    is_near_the_end = 0 < percent < 1 or 99 < percent < 99.95
    return f"{format_count(percent, 1 if is_near_the_end else 0)} %"


def format_ratio(ratio: float) -> str:
    """Render a speed ratio; above 1 is faster.

    >>> format_ratio(1.2031), format_ratio(12.3), format_ratio(0.002)
    ('1.20x', '12.3x', '0.0020x')
    >>> format_ratio(412.3), format_ratio(2_000)
    ('412x', '>1000x')
    """
    return ">1000x" if ratio >= MAX_RATIO else f"{_three_figures(ratio)}x"


def format_rate(per_s: float) -> str:
    """Render a rate with three significant figures; the column or the words say of what.

    >>> format_rate(66.42), format_rate(0.5), format_rate(12345.6), format_rate(0.00123)
    ('66.4', '0.50', '12346', '0.0012')
    """
    return _three_figures(per_s)


MAX_RATIO_END = 100.0
"""An interval that reaches further bounds nothing: no technique makes a step 100 times as fast."""


def format_interval(low: float, high: float) -> str:
    """Render an interval of a ratio; one without a meaningful end is unknown.

    >>> format_interval(1.183, 1.229), format_interval(9.5, 12.1), format_interval(0.0, 1e6)
    ('1.18-1.23', '9.50-12.1', 'unknown')
    """
    if high > MAX_RATIO_END:
        return "unknown"
    return f"{format_ratio(low)[:-1]}-{format_ratio(high)[:-1]}"


def _three_figures(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    # Below a tenth two figures are left, without an exponent.
    decimals = 1 - math.floor(math.log10(value)) if 0 < value < 0.1 else 2
    return f"{value:.{decimals}f}"
