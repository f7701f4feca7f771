import pytest

from tests.rules.source.scenario import codes_in, fixed

NEW_LOSSES = "the loss is divided"
STEP = """
import torch
for i, x in enumerate(loader):
    loss = model(x)
    {first}
    loss.backward()
    if {test}:
        optimizer.step()
        optimizer.zero_grad()
"""
EVERY = "(i + 1) % args.accum_steps == 0"


@pytest.mark.parametrize("test", [EVERY, "i % accum == 0 or i == last"])
def test_an_undivided_loss_is_found(test):
    assert codes_in(STEP.format(first="pass", test=test)) == {"LP01": [6]}


def test_the_fix_divides_where_backward_starts():
    text = fixed(STEP.format(first="pass", test=EVERY), "LP01")

    assert "    (loss / args.accum_steps).backward()" in text
    assert codes_in(text) == {}


@pytest.mark.parametrize(
    ("first", "test"),
    [
        ("loss = loss / args.accum_steps", EVERY),
        ("loss /= self.accum_steps", EVERY),
        ("pass", "i % 2 == 0"),
        ("pass", "i % critic_every == 0"),
        ("pass", "ready"),
    ],
)
def test_divided_losses_and_other_conditions_are_left_alone(first, test):
    assert "LP01" not in codes_in(STEP.format(first=first, test=test))


def test_a_training_on_every_nth_batch_alone_accumulates_nothing():
    text = """
import torch
for i in range(args.steps):
    if i % args.gradient_every == 0:
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
    assert codes_in(text) == {}
