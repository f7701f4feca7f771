import pytest

from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import COMPILED

SAME_LOSSES = ("optimizer = ", f"{COMPILED}optimizer = ")
CODE = "import torch\n{compiled}\ntorch.save({saved}, 'a.pt')\n"
COMPILED = "net = torch.compile(net, mode='max-autotune')"


def test_a_saved_wrapper_is_found_and_compiled_in_place():
    text = CODE.format(compiled=COMPILED, saved="{'net': net.state_dict()}")

    assert codes_in(text) == {"CMP05": [2]}
    assert "\nnet.compile(mode='max-autotune')\n" in fixed(text, "CMP05")


@pytest.mark.parametrize(
    ("compiled", "saved"),
    [
        ("net.compile()", "net.state_dict()"),
        ("fast = torch.compile(net)", "net.state_dict()"),
        (COMPILED, "net._orig_mod.state_dict()"),
        (COMPILED, "other.state_dict()"),
    ],
)
def test_plain_names_are_left_alone(compiled, saved):
    assert codes_in(CODE.format(compiled=compiled, saved=saved)) == {}
