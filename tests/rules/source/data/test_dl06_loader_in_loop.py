import textwrap

import pytest

from tests.rules.source.scenario import codes_in

HEAD = "from torch.utils.data import DataLoader\nloader = DataLoader(data)\n"
TRAIN = """
import torch
from torch.utils.data import DataLoader
for epoch in range(3):
    {made}
    for x in loader:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
"""


def test_a_loader_that_starts_for_each_batch_is_found():
    assert codes_in(f"{HEAD}while True:\n    x = next(iter(loader))\n") == {"DL06": [4]}


@pytest.mark.parametrize(
    "text",
    [
        "x = next(iter(loader))\n",
        "it = iter(loader)\nwhile True:\n    x = next(it)\n",
        "while True:\n    x = next(iter(names))\n",
    ],
)
def test_one_look_one_iterator_and_other_things_are_left_alone(text):
    assert codes_in(HEAD + text) == {}


def test_a_loader_of_each_epoch_is_found_where_workers_start():
    assert codes_in(TRAIN.format(made="loader = DataLoader(d, num_workers=n)"))["DL06"] == [5]
    assert "DL06" not in codes_in(TRAIN.format(made="loader = DataLoader(d)"))


def test_a_loader_of_each_fold_has_samples_of_its_own():
    head, epochs = TRAIN.format(made="pass").split("for epoch")
    made = "for fold in range(5):\n    loader = DataLoader(d[fold], num_workers=n)\n"
    text = head + made + textwrap.indent(f"for epoch{epochs}", "    ")

    assert "DL06" not in codes_in(text)


def test_the_only_batch_of_a_loader_of_its_own_is_left_alone():
    made = "for data in sets:\n    loader = DataLoader(data)\n    x = next(iter(loader))\n"

    assert codes_in(HEAD + made) == {}


def test_a_loader_for_an_evaluation_now_and_then_is_left_alone():
    text = """
import torch
from torch.utils.data import DataLoader
for step, x in enumerate(loader):
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
    if step % 100 == 0:
        evaluate(DataLoader(held_out, num_workers=4))
"""

    assert "DL06" not in codes_in(text)
