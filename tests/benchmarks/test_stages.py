"""Stages: one that fails, hangs or finds no time leaves the others and their results alone."""

import signal
import threading
import time

import pytest

from benchmarks.stages import (
    Stage,
    StageTimeError,
    run_side_by_side,
    run_stages,
    time_limit,
    worked,
)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, seconds, result=None):
        def work(given_s):
            self.now += seconds
            return result or {"given_s": given_s}

        return work


@pytest.fixture
def clock():
    return Clock()


def run(stages, clock, total_s=100.0):
    written = []
    results = run_stages(
        stages, lambda found: written.append(list(found)), total_s=total_s, clock=clock
    )
    return results, written


def broken(_seconds):
    raise RuntimeError("no device")


def endless(_seconds):
    while True:
        time.sleep(0.01)


def test_every_stage_gives_its_result_and_is_written_at_once(clock):
    stages = [
        Stage(name="one", work=clock.takes(5, {"x": 1}), most_s=10),
        Stage(name="two", work=clock.takes(7), most_s=10),
    ]

    results, written = run(stages, clock)

    assert results["one"] == {"status": "done", "result": {"x": 1}, "took_s": 5}
    assert written == [["one"], ["one", "two"]]


def test_a_stage_gets_its_share_or_what_is_left(clock):
    stages = [
        Stage(name="one", work=clock.takes(70), most_s=80),
        Stage(name="two", work=clock.takes(5), most_s=80),
    ]

    results, _ = run(stages, clock)

    assert results["one"]["result"] == {"given_s": 80}
    assert results["two"]["result"] == {"given_s": 30}


def test_a_stage_without_time_is_skipped(clock):
    stages = [
        Stage(name="one", work=clock.takes(85), most_s=90),
        Stage(name="two", work=clock.takes(5), most_s=30, least_s=20),
    ]

    results, _ = run(stages, clock)

    assert (results["two"]["status"], results["two"]["why"]) == ("skipped", "only 15 s left")


@pytest.mark.chaos
def test_a_stage_that_fails_is_told_and_the_next_one_runs(clock):
    stages = [
        Stage(name="one", work=broken, most_s=10),
        Stage(name="two", work=clock.takes(1), most_s=10),
    ]

    results, _ = run(stages, clock)

    assert results["one"]["why"] == "RuntimeError: no device"
    assert "in broken" in results["one"]["traceback"]
    assert worked(results, "two")


def test_what_needs_a_failed_stage_is_skipped(clock):
    stages = [
        Stage(name="data", work=broken, most_s=10),
        Stage(name="train", work=clock.takes(1), most_s=10, needs=("data",)),
    ]

    results, _ = run(stages, clock)

    assert (results["train"]["status"], results["train"]["why"]) == ("skipped", "without data")


@pytest.mark.chaos
def test_a_stage_that_hangs_is_ended(clock):
    stages = [
        Stage(name="one", work=endless, most_s=0.2),
        Stage(name="two", work=clock.takes(1), most_s=10),
    ]

    results, _ = run(stages, clock)

    assert results["one"]["why"] == "not done within 0 s"
    assert worked(results, "two")


def test_the_alarm_looks_like_ctrl_c_to_what_runs_inside():
    with pytest.raises(KeyboardInterrupt), time_limit(0.05):
        endless(0)

    assert issubclass(StageTimeError, KeyboardInterrupt)


def test_no_alarm_is_left_behind():
    before = signal.getsignal(signal.SIGALRM)

    with time_limit(60):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0

    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_side_by_side_what_another_needs_comes_first_and_a_failure_takes_none_along():
    order, barrier = [], threading.Barrier(2, timeout=20.0)

    def work(name, *, meets=False, fails=False):
        def done(_seconds):
            if meets:
                barrier.wait()  # both are under way at the same time
            order.append(name)
            if fails:
                raise ValueError(name)
            return {}

        return done

    stages = [
        Stage(name="needy", work=work("needy"), most_s=5.0, needs=("one",)),
        Stage(name="one", work=work("one", meets=True), most_s=20.0),
        Stage(name="two", work=work("two", meets=True, fails=True), most_s=20.0),
        Stage(name="late", work=work("late"), most_s=5.0, least_s=1e6),
    ]
    written = []

    def play(stage, seconds):
        try:
            return {"status": "done", "result": stage.work(seconds)}
        except ValueError as error:
            return {"status": "failed", "why": str(error)}

    results = run_side_by_side(
        stages, lambda found: written.append(set(found)), total_s=60.0, play=play
    )

    statuses = {name: entry["status"] for name, entry in results.items()}
    assert statuses == {"one": "done", "two": "failed", "needy": "done", "late": "skipped"}
    assert order.index("one") < order.index("needy")
    assert len(written[-1]) == 4
