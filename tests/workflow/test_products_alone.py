"""Products timed alone, in a real process."""

import sys

import pytest
import torch

from flatout.workflow.products_alone import even_ends
from flatout.workflow.roofline import time_alone
from tests.analysis.test_products import LINEAR, call, tensor

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


def test_products_in_groups_and_in_fp8_are_called_as_they_were():
    ends = {"shape": [4], "stride": [1], "dtype": "int32"}
    scale = {"shape": [], "stride": [], "dtype": "float32"}
    bf16, fp8 = {"dtype": "bfloat16"}, {"dtype": "float8_e4m3fn"}
    grouped = call(
        "_grouped_mm",
        *(tensor(64, 32) | bf16, tensor(4, 32, 16) | bf16, ends),
        out=tensor(64, 16, dtype="bfloat16"),
    )
    gradient = call(
        "_grouped_mm",
        *(tensor(32, 64, turned=True) | bf16, tensor(64, 16) | bf16, ends),
        out=tensor(4, 32, 16, dtype="bfloat16"),
        when="backward",
    )
    scaled = call(
        "_scaled_mm",
        *(tensor(64, 32) | fp8, tensor(32, 16, turned=True) | fp8, scale, scale),
        *(None, None, "torch.bfloat16"),
        out=tensor(64, 16, dtype="bfloat16"),
    )

    found = timed([[grouped], [gradient], [scaled]])

    assert [list(one) for (one,) in found] == [["ms", "n"]] * 3, found


def test_made_up_groups_are_equal_whole_lines_and_end_at_the_end():
    ends = torch.zeros(3, dtype=torch.int32)

    found = even_ends(torch.zeros(100, 8), torch.zeros(3, 8, 4), ends)

    assert found.tolist() == [32, 64, 100]
    assert found.dtype == torch.int32


def test_a_device_that_is_not_there_says_why():
    ((why,),) = time_alone([[LINEAR]], device="meta", threads=1, python=sys.executable, limit_s=5.0)

    assert why["why"].startswith("the products alone: measuring failed")
