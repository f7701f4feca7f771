import pytest

from tests.rules.source.scenario import codes_in, fixed

NEW_LOSSES = "each epoch gets an order of its own"
CODE = """
from torch.utils.data import DistributedSampler
{name} = DistributedSampler(data{more})
for epoch in range(3):
    {first}
    for x in loader:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
"""


def script(name="sampler", more="", first="pass"):
    return CODE.format(name=name, more=more, first=first)


def test_a_sampler_that_does_not_know_the_epoch_is_found_and_gets_it():
    assert codes_in(script()) == {"DS04": [3]}
    assert "range(3):\n    sampler.set_epoch(epoch)\n    pass" in fixed(script(), "DS04")


@pytest.mark.parametrize(
    "changes",
    [
        {"first": "loader.sampler.set_epoch(epoch)"},
        {"more": ", shuffle=False"},
        {"more": ", shuffle=args.shuffle"},
        {"name": "val_sampler"},
    ],
)
def test_samplers_that_know_or_do_not_shuffle_are_left_alone(changes):
    assert codes_in(script(**changes)) == {}


def test_a_sampler_that_each_epoch_makes_gets_no_line_above_itself():
    text = script().replace("sampler = DistributedSampler(data)\n", "")
    text = text.replace("    pass\n", "    sampler = DistributedSampler(data)\n")

    assert codes_in(text) == {"DS04": [4]}
    assert fixed(text, "DS04") == text
