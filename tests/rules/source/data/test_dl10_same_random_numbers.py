import pytest

from tests.rules.source.scenario import codes_in

CLASS = """
import numpy as np, random, torch
from torch.utils.data import Dataset, DataLoader
class Crops(Dataset):
    def __init__(self):
        self.rng = {made}
    def __getitem__(self, i):
        return {drawn}
{more}
"""


@pytest.mark.parametrize(
    "made", ["np.random.default_rng(0)", "np.random.RandomState(1)", "random.Random(2)"]
)
def test_a_generator_of_the_data_set_is_found(made):
    text = CLASS.format(made=made, drawn="self.rng.random()", more="")

    assert codes_in(text) == {"DL10": [6]}


@pytest.mark.parametrize(
    "changes",
    [
        {"drawn": "np.random.rand()"},
        {"made": "torch.randperm(3)"},
        {"more": "DataLoader(Crops(), worker_init_fn=seed)"},
    ],
)
def test_global_generators_and_seeded_workers_are_left_alone(changes):
    usual = {"made": "np.random.default_rng(0)", "drawn": "self.rng.random()", "more": ""}

    assert codes_in(CLASS.format(**{**usual, **changes})) == {}
