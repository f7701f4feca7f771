import pytest

from tests.rules.source.scenario import codes_in, fixed

SAME_LOSSES = ("x = table[rows]", "x = torch.stack([table[row] for row in rows])")
HEAD = (
    "import torch, numpy as np\nimages = torch.zeros(9, 3)\nrows = np.load('rows.npy')\n"
    "parts, samples = torch.chunk(images, 3), torch.utils.data.Subset(data, kept)\n"
    "two = 0, 1\n"
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.stack([images[i] for i in picked])", "images[picked]"),
        ("np.stack([rows[k] for k in order])", "rows[order]"),
        ("torch.stack([images[i] for i in two])", "images[list(two)]"),
    ],
)
def test_rows_that_are_picked_one_by_one_are_found(before, after):
    text = f"{HEAD}batch = {before}\n"

    assert codes_in(text) == {"DL23": [6]}
    assert fixed(text, "DL23") == f"{HEAD}batch = {after}\n"


@pytest.mark.parametrize(
    "expression",
    [
        "torch.stack([data[i] for i in picked])",
        "torch.stack([images[i] * 2 for i in picked])",
        "torch.stack([images[i] for i in picked if i])",
        "torch.stack([images[i] for i in picked], dim=1)",
        "torch.stack([images[0] for i in picked])",
        "torch.stack([parts[i] for i in picked])",
        "torch.stack([samples[i] for i in picked])",
    ],
)
def test_other_lists_are_left_alone(expression):
    assert codes_in(f"{HEAD}batch = {expression}\n") == {}
