"""Nouns in words: the cells and phrases that text, Markdown and HTML share."""

from flatout.core.ablation import Comparison, LossCheck, Row, Verdict
from flatout.core.profile import PeakBytes
from flatout.core.units import (
    MAX_RATIO_END,
    format_bytes,
    format_interval,
    format_ratio,
    format_share,
)

SCRIPT = "train.py"
"""Stands for the user's script in the commands of findings."""
NOTHING = "-"
"""Stands for a number that does not exist, so that no cell is empty by accident."""

PHASE_WORDS = {
    "data_wait": "data wait",
    "h2d": "copy to device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "other": "other",
}

VERDICT_WORDS = {
    Verdict.KEPT: "kept",
    Verdict.TOGETHER: "kept together",
    Verdict.NO_EFFECT: "too small",
    Verdict.WORSE: "slower",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.REJECTED: "rejected",
    Verdict.FAILED: "failed",
    Verdict.NOT_APPLICABLE: "not applicable",
}

LOSS_WORDS = {
    "same": "bit-identical",
    "within": "within limits",
    "rejected": "differs",
    "on_purpose": "on purpose",
    "not_compared": "not compared",
    "skipped": NOTHING,
}
"""What the guard saw: of a lever against the baseline, of the baseline against itself."""


def ratio_words(pair: Comparison | None) -> str:
    """Return the ratio of a comparison."""
    return format_ratio(pair.ratio) if pair else NOTHING


def interval_words(pair: Comparison | None) -> str:
    """Return the interval of a comparison."""
    return format_interval(*pair.interval) if pair else NOTHING


def pairs_words(pair: Comparison | None) -> str:
    """Return the number of pairs of a comparison."""
    return str(pair.n) if pair else NOTHING


def gain_words(pair: Comparison) -> str:
    """Say what a comparison shows, with its interval and n.

    >>> gain_words(Comparison(ratio=1.204, interval=(1.18, 1.23), n=5))
    '1.20x faster (95% interval 1.18-1.23, n=5 pairs)'
    >>> gain_words(Comparison(ratio=1.01, interval=(0.98, 1.05), n=5))
    'no difference (95% interval 0.98-1.05, n=5 pairs)'
    """
    proof = f"(95% interval {interval_words(pair)}, n={pair.n} pair{'s' * (pair.n != 1)})"
    if pair.interval[1] > MAX_RATIO_END:
        return f"{format_ratio(pair.ratio)}, not decided {proof}"
    if pair.covers_one:
        return f"no difference {proof}"
    if pair.ratio > 1:
        return f"{format_ratio(pair.ratio)} faster {proof}"
    return f"{format_ratio(pair.ratio)}, slower {proof}"


def verdict_words(row: Row) -> str:
    """Return the verdict on a lever; an interval that covers 1 is no difference."""
    pair = row.comparison
    if row.verdict is Verdict.NO_EFFECT and pair:
        if pair.n == 1 or pair.interval[1] < 1:
            return "no gain"
        if pair.covers_one:
            return "no difference"
    return VERDICT_WORDS[row.verdict]


def drop_words(row: Row) -> str:
    """Say what a kept lever still brings in the final recipe."""
    shown = f": {gain_words(row.comparison)}" if row.comparison else ""
    if row.verdict in (Verdict.NO_EFFECT, Verdict.WORSE):
        return f"it no longer pays{shown}"
    if row.verdict is Verdict.KEPT:
        return f"it still pays{shown}"
    return f"undecided in the few pairs there were time for{shown}"


def loss_words(check: LossCheck | None) -> str:
    """Return what the guard says about a recipe, in two words."""
    return LOSS_WORDS.get(check.status, check.status) if check else NOTHING


def settings_words(row: Row) -> str:
    """Return the settings of a lever on one line."""
    return row.choice.label.removeprefix(row.choice.technique).strip()


def memory_words(peak: PeakBytes) -> str:
    """Return the peak memory: what the device's tensors took, or the process where unknown."""
    count = peak.allocated or peak.device
    return format_bytes(count) if count else NOTHING


def sentence(text: str) -> str:
    """Return the text with one full stop at its end.

    >>> sentence("it waits"), sentence("it waits.")
    ('it waits.', 'it waits.')
    """
    return text.rstrip(". ") + "."


def busy_words(share: float | None) -> str:
    """Return the device-busy share."""
    return NOTHING if share is None else format_share(share)


def advice_words(advice: str, workload: str) -> str:
    """Return what to do about a finding, with the user's own script in its commands.

    >>> advice_words("look at the loop, then flatout measure train.py", "main.py --epochs 3")
    'look at the loop, then flatout measure main.py --epochs 3'
    """
    return advice.replace(SCRIPT, workload)
