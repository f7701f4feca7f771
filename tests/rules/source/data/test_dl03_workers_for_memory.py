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


def test_what_only_workers_take_goes_with_them():
    more = "num_workers=8, persistent_workers=True, prefetch_factor=4"
    text = f"{HEAD}loader = DataLoader(TensorDataset(torch.zeros(4, 2)), 2, {more})\n"
    text = f"import torch\n{text}"

    new = fixed(text, "DL03")

    assert "num_workers=0, persistent_workers=False, prefetch_factor=None)" in new
    exec(new, {})
    with pytest.raises(ValueError, match="num_workers"):
        exec(text.replace("num_workers=8", "num_workers=0"), {})


def test_workers_given_by_position_are_replaced_there():
    text = f"{HEAD}loader = DataLoader(TensorDataset(x), 32, True, None, None, 8)\n"

    assert fixed(text, "DL03").endswith("32, True, None, None, 0)\n")


def test_a_call_that_may_be_given_more_gets_no_fix():
    text = f"{HEAD}loader = DataLoader(TensorDataset(x), num_workers=8, **options)\n"

    assert codes_in(text) == {"DL03": [2]}
    assert fixed(text, "DL03") == text
