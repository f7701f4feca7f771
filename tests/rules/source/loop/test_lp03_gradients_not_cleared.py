import pytest

from tests.rules.source.scenario import codes_in, fixed

NEW_LOSSES = "the gradients are cleared"
LOOP = """
import torch
for x in loader:
    {first}
    loss = model(x)
    loss.backward()
    {between}
    optimizer.step()
    {last}
    done = True
"""


def script(first="pass", between="pass", last="pass"):
    return LOOP.format(first=first, between=between, last=last)


def test_gradients_that_are_never_cleared_are_found():
    assert codes_in(script()) == {"LP03": [8]}
    assert "    optimizer.zero_grad()\n    loss.backward()" in fixed(script(), "LP03")


@pytest.mark.parametrize("name", ["optimizer", "model"])
def test_clearing_before_the_step_is_found_only_for_what_is_stepped(name):
    found = codes_in(script(between=f"{name}.zero_grad()"))

    assert found == ({"LP03": [7]} if name == "optimizer" else {})


def test_the_fix_moves_the_call_behind_the_step():
    text = fixed(script(between="optimizer.zero_grad()"), "LP03")

    assert text == script(between="GONE", last="optimizer.zero_grad()\n    pass").replace(
        "    GONE\n", ""
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"first": "optimizer.zero_grad()"},
        {"last": "model.zero_grad(set_to_none=True)"},
        {"last": "for p in model.parameters(): p.grad = None"},
        {"last": "p.grad.zero_()"},
    ],
)
def test_gradients_cleared_in_any_way_are_left_alone(changes):
    assert codes_in(script(**changes)) == {}


def test_an_optimizer_that_is_made_for_each_round_has_new_gradients():
    made = "optimizer = torch.optim.SGD(copy(model).parameters())"

    assert codes_in(script(first=made)) == {}


def test_two_optimizers_in_turn_are_left_alone():
    text = """
import torch
for x in loader:
    a.zero_grad()
    opt_b.zero_grad()
    loss = model(x)
    loss.backward()
    opt_a.step()
    opt_a.zero_grad()
    other = model(x)
    other.backward()
    opt_b.step()
"""
    assert "LP03" not in codes_in(text)
