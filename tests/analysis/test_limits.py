import pytest

from flatout.analysis.regime import drained_per_s, loaders_per_s, main_dtype
from flatout.analysis.steps import medians_by_step


def test_a_step_of_two_optimizers_holds_the_operations_of_both():
    rows = [
        {"who": who, "by_dtype": {"float32": 10 * (who + 1), "bfloat16": 1}} for who in (0, 1, 0, 1)
    ]

    assert medians_by_step(rows, "by_dtype") == {"bfloat16": 2, "float32": 30}


def test_a_ragged_step_does_not_move_the_median():
    rows = [{"who": 0, "by_dtype": {"float32": count}} for count in (10, 10, 3)]

    assert medians_by_step(rows, "by_dtype") == {"float32": 10}


def test_without_segments_there_is_no_dtype():
    assert main_dtype(medians_by_step([], "by_dtype")) == ""


def test_batches_prefetched_during_the_start_of_the_workers_do_not_count():
    times_s = [3.0, 3.0, 3.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]

    rate = drained_per_s({"times_s": times_s, "samples": [8] * 9, "ahead": 4})

    # From the first batch that was not ready: 4 batches in 4 seconds.
    assert rate == 8.0


@pytest.mark.parametrize("times_s", [[], [1.0]])
def test_too_few_batches_make_no_rate(times_s):
    assert drained_per_s({"times_s": times_s, "samples": [8] * len(times_s), "ahead": 0}) is None


def test_the_slowest_loader_is_the_limit():
    fast = {"times_s": [1.0, 2.0, 3.0], "samples": [8, 8, 8], "ahead": 0}
    slow = {"times_s": [1.0, 3.0, 5.0], "samples": [8, 8, 8], "ahead": 0}

    assert loaders_per_s({"loaders": {"a": fast, "b": slow}}) == 4.0
    assert loaders_per_s({"loaders": {}}) is None
