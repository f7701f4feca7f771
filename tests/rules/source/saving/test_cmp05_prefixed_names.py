import pytest

from flatout.rules import source
from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import COMPILED, MODEL

SAME_LOSSES = (MODEL, COMPILED)
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


def test_a_sequential_is_saved_without_its_wrapper():
    # Compiled in place it would run uncompiled: its `forward` is torch's own.
    made = f"net = torch.nn.Sequential(torch.nn.Linear(2, 2)).to('cpu')\n{COMPILED}"
    text = CODE.format(compiled=made, saved="net.state_dict()")

    (issue,), _failed = source.check_text(text)
    assert "net._orig_mod.state_dict()" in issue.instead
    assert not issue.fix
