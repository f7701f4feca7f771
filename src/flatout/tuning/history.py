"""What earlier tunings on this machine found: a local file, one line for each technique tried.

The next tuning orders by it. It never keeps a technique out, and nothing of it leaves the machine.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from flatout.launch.trial_process import scratch_root
from flatout.records.ablation import Ablation
from flatout.records.errors import UserError
from flatout.records.input_files import MAX_OWN_BYTES, parse_json, read_bytes
from flatout.records.json_records import from_plain, to_plain
from flatout.records.technique import EarlierResult

FILE = "history.jsonl"
WIDEST = 2.0
"""Intervals that leave a larger factor open say nothing of a prediction."""
Errors = Mapping[str, Sequence[float]]
"""By technique: how far the logs of measured ratios were above those predicted."""


def history_path() -> Path:
    """Return where this user's history on this machine is."""
    return scratch_root() / FILE


def read_history(path: Path) -> list[EarlierResult]:
    """Return all results, the oldest first; a line that cannot be read is left out."""
    try:
        lines = read_bytes(path, MAX_OWN_BYTES).splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read: {error}; 'flatout techniques --forget-history' deletes it"
        ) from None
    return [one for line in lines if (one := _result(line)) is not None]


def _result(line: bytes) -> EarlierResult | None:
    """Return one line; None for another version's, or half of one of a process that was killed."""
    try:
        return from_plain(EarlierResult, parse_json(line))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def errors_on(device: str, results: Iterable[EarlierResult]) -> dict[str, list[float]]:
    """Return the errors of the predictions on one device.

    >>> one = EarlierResult(at="", script="a", device="CPU", technique="x", predicted=1.0,
    ...     ratio=1.25, interval=(1.2, 1.3), n=3, verdict="kept")
    >>> errors_on("CPU", [one]), errors_on("another CPU", [one])
    ({'x': [0.22314355131420976]}, {})
    """
    errors: dict[str, list[float]] = {}
    for one in results:
        low, high = one.interval
        # An end that is open was stored as none.
        is_narrow = low is not None and high is not None and 0 < high <= WIDEST * low
        is_known = one.n > 1 and is_narrow and min(one.predicted, one.ratio) > 0
        is_known = is_known and math.isfinite(one.predicted) and math.isfinite(one.ratio)
        if one.device == device and is_known:
            errors.setdefault(one.technique, []).append(math.log(one.ratio / one.predicted))
    return errors


def append_results(path: Path, ablation: Ablation, script: str, device: str) -> None:
    """Append what a tuning found of each technique that was compared on its own.

    On a full disk the history lacks it: the tuning's own result is worth more than its end.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found = [
        EarlierResult(
            at=now,
            script=script,
            device=device,
            technique=row.choice.technique,
            predicted=row.predicted_ratio,
            ratio=row.comparison.ratio,
            interval=row.comparison.interval,
            n=row.comparison.n,
            verdict=row.verdict.value,
            settings=row.choice.settings,
        )
        for row in ablation.rows
        if row.stage == "add" and row.comparison and row.predicted_ratio and not row.together_with
    ]
    with contextlib.suppress(OSError, UserError):
        # A tuning that is resumed brings what it brought before its end, too.
        known = {_line(replace(one, at="")) for one in read_history(path)}
        new = [_line(one) for one in found if _line(replace(one, at="")) not in known]
        if new:
            with path.open("a", encoding="utf-8") as file:
                # The first end closes a line that a process which was killed left half written.
                file.write("\n".join(["", *new, ""]))


def _line(one: EarlierResult) -> str:
    return json.dumps(to_plain(one))
