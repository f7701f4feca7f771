"""Unit constants and the formatters every report uses."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def format_bytes(count: float) -> str:
    """Render a byte count in GiB, or MiB below one GiB.

    >>> format_bytes(3 * GIB)
    '3.00 GiB'
    >>> format_bytes(5 * MIB)
    '5.0 MiB'
    """
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def format_sample_bytes(count: float) -> str:
    """Render a byte count as `format_bytes` does, in KiB below one MiB.

    >>> format_sample_bytes(77_000)
    '75.2 KiB'
    >>> format_sample_bytes(5 * MIB)
    '5.0 MiB'
    """
    return format_bytes(count) if count >= MIB else f"{count / KIB:.1f} KiB"


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
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_share(share: float) -> str:
    """Render a share in [0, 1] as percent.

    >>> format_share(0.354), format_share(0.004), format_share(1.0)
    ('35 %', '0.4 %', '100 %')
    """
    percent = 100 * share
    return f"{percent:.1f} %" if 0 < percent < 1 else f"{percent:.0f} %"


def format_ratio(ratio: float) -> str:
    """Render a speed ratio; above 1 is faster.

    >>> format_ratio(1.2031), format_ratio(12.3)
    ('1.20x', '12.3x')
    """
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def format_rate(per_s: float) -> str:
    """Render a rate with three significant figures; the column or the words say of what.

    >>> format_rate(66.42), format_rate(0.5), format_rate(12345.6)
    ('66.4', '0.50', '12346')
    """
    return _three_figures(per_s)


MAX_RATIO_END = 100.0
"""An interval that reaches further bounds nothing: no lever makes a step 100 times as fast."""


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
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
