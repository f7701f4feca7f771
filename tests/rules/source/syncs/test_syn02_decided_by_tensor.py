import pytest

from tests.rules.source.scenario import codes_in

STEP = """
import torch
for step, (x, y) in enumerate(loader):
    loss = criterion(model(x.cuda()), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if {test}:
        skipped += 1
"""


@pytest.mark.parametrize(
    "test", ["torch.isnan(loss)", "loss > 10", "not torch.isfinite(loss).all()", "ok and loss < 1"]
)
def test_a_decision_by_a_tensor_is_found(test):
    assert codes_in(STEP.format(test=test)) == {"SYN02": [8]}


@pytest.mark.parametrize(
    "test",
    [
        *("step % 10 == 0 and loss > 1", "loss is None", "loss.requires_grad", "len(x) > 3"),
        "flag",
        *("loss.is_contiguous()", "loss.nelement() > 1", "loss.is_floating_point()"),
    ],
)
def test_rare_decisions_and_those_of_the_host_are_left_alone(test):
    assert codes_in(STEP.format(test=test)) == {}


def test_numbers_of_an_engine_that_takes_the_loss_are_no_tensors():
    text = """
import torch
for x in loader:
    loss = model(x.cuda())
    model.backward(loss)
    model.step()
    length = model.scheduler.current_length()
    if length < longest:
        break
"""

    assert "SYN02" not in codes_in(text)
