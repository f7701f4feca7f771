import pytest

from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import READ

SAME_LOSSES = (READ, f"{READ}        total += loss\n")
STEP = """
import torch
for x, y in loader:
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {line}
"""


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("total += loss  # summed", "total += loss.detach()  # summed"),
        ("losses.append(loss)", "losses.append(loss.detach())"),
        ("total += loss * len(x)", "total += (loss * len(x)).detach()"),
    ],
)
def test_a_loss_kept_with_its_graph_is_found_and_detached_safely(line, after):
    text = STEP.format(line=line)

    assert codes_in(text) == {"MEM01": [8]}
    assert fixed(text, "MEM01", suggested=False) == STEP.format(line=after)


@pytest.mark.parametrize(
    "backward", ["scaler.scale(loss).backward()", "((loss + extra) / steps).backward()"]
)
def test_a_loss_that_is_scaled_or_divided_for_its_backward_is_found_too(backward):
    text = STEP.format(line="total += loss").replace("loss.backward()", backward)

    assert codes_in(text) == {"MEM01": [8]}


@pytest.mark.parametrize(
    "line",
    [
        "total += loss.detach()",
        "total += loss.item()",
        "total += float(loss)",
        "total += len(x)",
        "sizes.append(loss.shape)",
    ],
)
def test_what_has_no_graph_is_left_alone(line):
    assert "MEM01" not in codes_in(STEP.format(line=line))


def test_losses_that_are_trained_on_in_the_end_need_their_graphs():
    text = f"""{STEP.format(line="losses.append(loss)")}
stacked = torch.stack(losses)
whole = stacked.mean()
whole += penalty
whole.backward()
"""
    assert "MEM01" not in codes_in(text)


def test_a_sum_that_is_trained_on_needs_its_graph():
    text = """
import torch
for batch in loader:
    total = 0
    for x in batch:
        loss = model(x)
        total += loss
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert "MEM01" not in codes_in(text)


def test_a_sum_over_steps_that_is_trained_on_later_needs_its_graph():
    text = """
import torch
total = 0
for x in loader:
    loss = model(x)
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    total += loss
total.backward()
"""
    assert "MEM01" not in codes_in(text)


@pytest.mark.parametrize("read", ["loss.item()", "float(loss)", "loss.cpu().tolist()"])
def test_a_loss_whose_name_has_become_a_number_is_left_alone(read):
    text = STEP.format(line=f"loss = {read}\n    total += loss")

    assert "MEM01" not in codes_in(text)


def test_a_loss_that_lost_its_graph_before_it_is_kept_is_left_alone():
    text = """
import torch
for x in loader:
    loss = model(x)
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    losses.append(loss)
"""

    assert "MEM01" not in codes_in(text)
