"""Products timed alone, in a real process."""

import sys

import pytest

from flatout.profiling.products_alone import time_alone
from tests.profiling.test_products import LINEAR, call, tensor

pytestmark = pytest.mark.slow

IMAGE = (tensor(2, 3, 8, 8), tensor(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
BROKEN = call("mm", tensor(3, 4), tensor(5, 6), out=tensor(3, 6))


def timed(groups, limit_s=60.0):
    return time_alone(groups, device="cpu", threads=1, python=sys.executable, limit_s=limit_s)


def test_every_call_of_every_group_has_a_time_or_a_reason():
    convolution = call("convolution", *IMAGE, out=tensor(2, 4, 8, 8))
    wider = {**LINEAR, "arguments": [tensor(64, 32), tensor(32, 20)]}

    alone, broken, pair = timed([[convolution], [BROKEN], [LINEAR, wider]])

    assert alone[0]["ms"] > 0
    assert alone[0]["n"] >= 3
    assert "RuntimeError" in broken[0]["why"]
    assert len({entry["n"] for entry in pair}) == 1


def test_a_device_that_is_not_there_says_why():
    with pytest.raises(ValueError, match="the products alone: measuring failed"):
        time_alone([[LINEAR]], device="meta", threads=1, python=sys.executable, limit_s=5.0)
