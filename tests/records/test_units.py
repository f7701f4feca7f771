"""What is no number is written as that: a damaged result must not end a report."""

import inspect
import math

import pytest

from flatout.records import units

FORMATS = [
    function
    for name, function in vars(units).items()
    if name.startswith("format_") and len(inspect.signature(function).parameters) == 1
]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.0])
@pytest.mark.parametrize("function", FORMATS)
def test_any_number_can_be_written(function, number):
    assert isinstance(function(number), str)


def test_every_way_to_write_one_number_is_tried():
    assert {function.__name__ for function in FORMATS} >= {"format_bytes", "format_rate"}
