import atexit
import os
import time

import psutil
import pytest

from flatout.data.forked import ForkedError, in_fork, in_forks


def test_the_result_comes_back_and_nothing_else():
    seen = []

    found = in_fork(lambda: seen.append(1) or {"pid": os.getpid()}, 10)

    assert found["pid"] != os.getpid()
    assert seen == []


def test_a_large_result_comes_back_whole():
    assert in_fork(lambda: list(range(100_000)), 10) == list(range(100_000))


@pytest.mark.chaos
def test_what_it_raises_is_told():
    def fail():
        raise KeyError("cat")

    with pytest.raises(ForkedError, match="KeyError: 'cat'"):
        in_fork(fail, 10)


@pytest.mark.chaos
def test_a_copy_that_is_killed_or_slow_is_told_and_gone():
    before = psutil.Process().children()

    with pytest.raises(ForkedError, match="was killed"):
        in_fork(lambda: os.kill(os.getpid(), 9), 10)
    with pytest.raises(ForkedError, match="not done within"):
        in_fork(lambda: time.sleep(60), 0.2)

    assert psutil.Process().children() == before


def test_several_work_side_by_side_and_each_has_its_answer():
    def nap(number):
        return lambda: time.sleep(0.1) or number

    answers = in_forks([nap(1), lambda: 1 / 0, nap(3)], 10)

    assert [answer.get("value") for answer in answers] == [1, None, 3]
    assert "ZeroDivisionError" in answers[1]["error"]


def test_no_exit_handler_of_the_script_runs_in_a_copy(tmp_path):
    mark = tmp_path / "ended"
    handler = atexit.register(mark.write_text, "x")

    in_fork(lambda: 1, 10)

    atexit.unregister(handler)
    assert not mark.exists()
