"""The first line of a report names the known cause; two scripts here are for each run of the tests.

The others are in `test_more_ordinary_scripts.py`, as their causes are a matter of microseconds.
"""

import pytest

from tests.support.ordinary import COMPUTES, check_report

pytestmark = [pytest.mark.slow, pytest.mark.smoke]


def test_a_loader_that_sleeps(tmp_path):
    check_report(
        tmp_path,
        "network_disk",
        r"^\d\d % of each step waits for data",
        {"data_wait", "blocked_reads"},
    )


def test_a_model_that_computes(tmp_path):
    check_report(tmp_path, "char_gpt", COMPUTES, set())
