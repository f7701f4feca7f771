import pytest

from tests.rules.source.scenario import codes_in

FLAGS = """
import torch.backends.cudnn as cudnn
cudnn.benchmark = {benchmark}
cudnn.deterministic = {deterministic}
"""


def test_both_at_once_are_found():
    assert codes_in(FLAGS.format(benchmark=True, deterministic=True)) == {"LP05": [3]}


@pytest.mark.parametrize(
    ("benchmark", "deterministic"), [(True, False), (False, True), ("f", True)]
)
def test_one_of_them_is_left_alone(benchmark, deterministic):
    assert codes_in(FLAGS.format(benchmark=benchmark, deterministic=deterministic)) == {}


def test_two_branches_are_left_alone():
    text = FLAGS.format(benchmark=True, deterministic=True).replace("cudnn.det", "if f: cudnn.det")

    assert codes_in(text) == {}
