import pytest

from tests.rules.source.scenario import codes_in

CODE = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler as Parts
model = {wrap}(model)
loader = DataLoader(data, 32{more})
"""


def test_a_shuffled_loader_of_every_rank_is_found():
    text = CODE.format(wrap="DDP", more=", shuffle=True").replace(
        ", DistributedSampler as Parts", ""
    )

    assert codes_in(text) == {"DS03": [5]}


@pytest.mark.parametrize(
    ("wrap", "more"),
    [
        ("DDP", ""),
        ("DDP", ", sampler=Parts(data)"),
        ("make", ", shuffle=True"),
        ("DDP", ", **more"),
    ],
)
def test_samplers_unshuffled_loaders_and_single_processes_are_left_alone(wrap, more):
    assert "DS03" not in codes_in(CODE.format(wrap=wrap, more=more))
