import pytest

from tests.rules.source.scenario import codes_in

CODE = """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        {line}
        return x
    def other(self, x):
        print(x)
model = Net()
{compiled}
"""
COMPILED = "model = torch.compile(model)"


@pytest.mark.parametrize("line", ["print('here')", "n = x.max().item()", "a = x.cpu().view(-1)"])
def test_a_break_of_a_compiled_forward_is_found(line):
    assert codes_in(CODE.format(line=line, compiled=COMPILED)) == {"CMP01": [5]}


@pytest.mark.parametrize(
    ("line", "compiled"), [("print(x)", "pass"), ("x = x + 1", COMPILED), ("d.item(x)", COMPILED)]
)
def test_models_that_are_not_compiled_and_plain_forwards_are_left_alone(line, compiled):
    assert codes_in(CODE.format(line=line, compiled=compiled)) == {}
