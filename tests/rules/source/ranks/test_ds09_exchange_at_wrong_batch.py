import pytest

from tests.rules.source.scenario import codes_in

CODE = """
import torch, contextlib
for i, x in enumerate(loader):
    if {guard}:
        with model.no_sync():
            (model(x) / n).backward()
    else:
        (model(x) / n).backward()
    if (i + 1) % n == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_two_ways_to_count_are_found():
    assert codes_in(CODE.format(guard="i % n != 0")) == {"DS09": [5]}


@pytest.mark.parametrize("guard", ["(i + 1) % n != 0", "not last", "i % other"])
def test_one_way_to_count_is_left_alone(guard):
    assert codes_in(CODE.format(guard=guard)) == {}
