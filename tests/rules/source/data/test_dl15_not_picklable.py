import pytest

from tests.rules.source.scenario import codes_in

CODE = """
from torch.utils.data import DataLoader
def at_the_top(rows):
    return rows
short = lambda rows: rows
def main():
    def nested(rows):
        return rows
    return DataLoader(data, num_workers={workers}, collate_fn={function})
"""


@pytest.mark.parametrize("function", ["lambda rows: rows", "nested", "short"])
def test_what_cannot_be_pickled_is_found(function):
    assert codes_in(CODE.format(workers=2, function=function)) == {"DL15": [9]}


@pytest.mark.parametrize(
    ("workers", "function"), [(2, "at_the_top"), (0, "nested"), (2, "self.collate"), (2, "given")]
)
def test_functions_at_the_top_and_loaders_without_workers_are_left_alone(workers, function):
    assert codes_in(CODE.format(workers=workers, function=function)) == {}
