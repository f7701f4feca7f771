import pytest

from tests.rules.source.scenario import codes_in, fixed

SAME_LOSSES = ("zero_grad()", "zero_grad(set_to_none=False)")
TRAIN = """
import torch
for x in loader:
    optimizer.zero_grad({given})
    model(x).sum().backward()
    optimizer.step()
"""


def test_zeros_that_are_asked_for_are_found_and_no_longer_asked_for():
    text = TRAIN.format(given="set_to_none=False")

    assert codes_in(text) == {"LP13": [4]}
    assert fixed(text, "LP13") == TRAIN.format(given="")


def test_an_argument_without_its_name_is_found_and_left_to_the_reader():
    text = TRAIN.format(given="False")

    assert codes_in(text) == {"LP13": [4]}
    assert fixed(text, "LP13") == text


@pytest.mark.parametrize("given", ["", "set_to_none=True", "set_to_none=args.none", "**options"])
def test_gradients_that_are_let_go_are_left_alone(given):
    assert codes_in(TRAIN.format(given=given)) == {}
