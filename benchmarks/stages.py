"""Work in stages against a clock: each has its share, none takes the others down, all is kept."""

import importlib.util
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

Results = dict[str, dict[str, Any]]


class StageTimeError(KeyboardInterrupt):
    """A stage's time is up. To what runs inside it is Ctrl-C: tune then returns what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of a long run."""

    name: str
    work: Callable[[float], Mapping[str, Any]]
    """Does the work within the seconds it is given and returns plain values."""
    most_s: float
    least_s: float = 10.0
    """With less time left it is skipped: it could not finish anything."""
    needs: tuple[str, ...] = ()
    """Stages that have to have worked."""
    packages: tuple[str, ...] = ()
    """What has to be installed for it, by the names that are imported."""


def run_stages(
    stages: Sequence[Stage],
    write: Callable[[Results], None],
    *,
    total_s: float,
    clock: Callable[[], float] = time.monotonic,
    play: "Callable[[Stage, float], dict[str, Any]] | None" = None,
) -> Results:
    """Run the stages in order and return what each gave; `write` gets all so far after each.

    `play` plays one stage for so many seconds; in this process where none is given.
    """
    started = clock()
    results: Results = {}
    for stage in stages:
        began = clock()
        left_s = total_s - (began - started)
        results[stage.name] = _skipped(stage, results, left_s) or (play or outcome)(
            stage, min(stage.most_s, left_s)
        )
        results[stage.name]["took_s"] = round(clock() - began, 2)
        write(results)
    return results


def run_side_by_side(
    stages: Sequence[Stage],
    write: Callable[[Results], None],
    *,
    total_s: float,
    play: "Callable[[Stage, float], dict[str, Any]]",
) -> Results:
    """Run stages that time nothing all at once, each after those that it needs."""
    began = time.monotonic()
    results: Results = {}
    ended = {stage.name: threading.Event() for stage in stages}
    lock = threading.Lock()

    def run(stage: Stage) -> None:
        try:
            for name in stage.needs:
                ended[name].wait()
            started = time.monotonic()
            left_s = total_s - (started - began)
            found = _skipped(stage, results, left_s) or play(stage, min(stage.most_s, left_s))
            with lock:
                results[stage.name] = found | {"took_s": round(time.monotonic() - started, 2)}
                write(results)
        finally:
            ended[stage.name].set()

    with ThreadPoolExecutor(len(stages)) as pool:
        list(pool.map(run, stages))
    return results


def worked(results: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    """Return whether a stage ran to its end."""
    return results.get(name, {}).get("status") == "done"


def _skipped(stage: Stage, results: Results, left_s: float) -> dict[str, Any] | None:
    """Return why a stage cannot be played; None where it can."""
    absent = [name for name in stage.packages if importlib.util.find_spec(name) is None]
    if absent:
        return {"status": "skipped", "why": f"not installed: {', '.join(absent)}"}
    missing = [name for name in stage.needs if not worked(results, name)]
    if missing:
        return {"status": "skipped", "why": f"without {', '.join(missing)}"}
    if left_s < stage.least_s:
        return {"status": "skipped", "why": f"only {left_s:.0f} s left"}
    return None


def outcome(stage: Stage, seconds: float) -> dict[str, Any]:
    """Play a stage in this process and return how it went."""
    try:
        with time_limit(seconds):
            return {"status": "done", "result": dict(stage.work(seconds))}
    except StageTimeError:
        return {"status": "failed", "why": f"not done within {seconds:.0f} s"}
    except Exception as error:  # noqa: BLE001  one stage must not cost the others their time
        last = "".join(traceback.format_exception(error))[-4_000:]
        return {"status": "failed", "why": f"{type(error).__name__}: {error}", "traceback": last}


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise StageTimeError in the main thread when the time is up."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise StageTimeError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
