import pytest

from tests.rules.source.scenario import codes_in

STREAM = """
import torch
from torch.utils.data import DataLoader, IterableDataset
class Lines(IterableDataset):
    def __iter__(self):
        {first}
        yield from self.lines
loader = DataLoader(Lines(){more})
"""


def test_a_stream_that_each_worker_reads_whole_is_found():
    assert codes_in(STREAM.format(first="pass", more=", num_workers=2")) == {"DL11": [5]}


@pytest.mark.parametrize(
    ("first", "more"),
    [
        ("info = torch.utils.data.get_worker_info()", ", num_workers=2"),
        ("pass", ""),
        ("pass", ", num_workers=2, worker_init_fn=split"),
    ],
)
def test_a_stream_that_is_divided_or_has_no_workers_is_left_alone(first, more):
    assert codes_in(STREAM.format(first=first, more=more)) == {}


def test_an_endless_stream_of_random_samples_differs_from_worker_to_worker():
    drawn = "while True: yield torch.randint(0, 9, (8,))"

    assert codes_in(STREAM.format(first=drawn, more=", num_workers=2")) == {}
    assert "DL11" in codes_in(
        STREAM.format(first="while True: yield self.x", more=", num_workers=2")
    )
