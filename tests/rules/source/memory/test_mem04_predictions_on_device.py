import pytest

from tests.rules.source.scenario import codes_in

CODE = """
import torch
net.eval()
with torch.no_grad():
    for x in loader:
        out = net(x.cuda())
        {line}
"""


@pytest.mark.parametrize("line", ["kept.append(out)", "kept.append(net(x))"])
def test_outputs_that_stay_on_the_device_are_found(line):
    assert codes_in(CODE.format(line=line)) == {"MEM04": [7]}


@pytest.mark.parametrize(
    "line",
    ["kept.append(out.cpu())", "out = out.argmax(1).cpu(); kept.append(out)", "kept.append(x)"],
)
def test_what_is_reduced_or_on_the_host_is_left_alone(line):
    assert codes_in(CODE.format(line=line)) == {}
