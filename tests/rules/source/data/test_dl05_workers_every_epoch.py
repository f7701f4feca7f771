import pytest

from tests.rules.source.scenario import codes_in, fixed

NEW_LOSSES = "workers that live on draw their seed once, so later epochs have another order"
EPOCHS = """
from torch.utils.data import DataLoader
loader = DataLoader(
    data,
    num_workers=2,{more}  # of two cores
)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        pass
"""


def test_workers_of_each_epoch_are_found():
    text = EPOCHS.format(more="")

    assert codes_in(text) == {"DL05": [3]}
    assert "    num_workers=2,  # of two cores\n    persistent_workers=True,\n)" in fixed(
        text, "DL05"
    )


@pytest.mark.parametrize("more", [" persistent_workers=True,", " persistent_workers=args.keep,"])
def test_workers_that_stay_are_left_alone(more):
    assert codes_in(EPOCHS.format(more=more)) == {}


def test_a_single_epoch_is_left_alone():
    text = EPOCHS.format(more="").replace("for epoch in range(3)", "if True")

    assert codes_in(text) == {}


def test_workers_of_a_loader_that_each_epoch_makes_cannot_stay():
    text = """
from torch.utils.data import DataLoader
for {first} in range(3):
    loader = DataLoader(data, num_workers=2)
    {second}
        for batch in loader:
            train(batch)
"""

    assert codes_in(text.format(first="epoch", second="if True:")) == {}
    assert codes_in(text.format(first="fold", second="for epoch in range(9):")) == {"DL05": [4]}


def test_a_loader_that_should_have_no_workers_is_not_told_to_keep_them():
    text = """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(x, y)
loader = DataLoader(data, num_workers=2)
for epoch in range(3):
    for batch in loader:
        train(batch)
"""

    assert set(codes_in(text)) == {"DL03"}


def test_the_loader_of_each_branch_is_found():
    text = """
from torch.utils.data import DataLoader
if shuffled:
    loader = DataLoader(data, num_workers=2, shuffle=True)
else:
    loader = DataLoader(data, num_workers=2)
for epoch in range(3):
    for batch in loader:
        train(batch)
"""

    assert codes_in(text) == {"DL05": [4, 6]}
