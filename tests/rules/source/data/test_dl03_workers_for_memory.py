import pytest

from tests.rules.source.scenario import codes_in, fixed

SAME_LOSSES = ("8, shuffle=True", "8, shuffle=True, num_workers=2")
HEAD = "from torch.utils.data import DataLoader, TensorDataset, Subset\n"


def test_workers_for_tensors_in_memory_are_found_and_taken_away():
    text = f"{HEAD}loader = DataLoader(TensorDataset(x), 32, num_workers=8, shuffle=True)\n"

    assert codes_in(text) == {"DL03": [2]}
    assert fixed(text, "DL03").endswith("32, num_workers=0, shuffle=True)\n")


@pytest.mark.parametrize(
    "arguments", ["TensorDataset(x), 32", "TensorDataset(x), num_workers=n", "data, num_workers=8"]
)
def test_no_workers_unknown_numbers_and_other_data_are_left_alone(arguments):
    assert codes_in(f"{HEAD}loader = DataLoader({arguments})\n") == {}
