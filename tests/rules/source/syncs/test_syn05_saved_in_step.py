import pytest

from tests.rules.source.scenario import codes_in

LOOP = """
import torch
for epoch in range(3):
    for step, x in enumerate(loader):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        {inner}
    {outer}
"""
SAVE = "torch.save(model.state_dict(), f'{step}.pt')"


def test_a_save_in_every_step_is_found():
    assert codes_in(LOOP.format(inner=SAVE, outer="pass")) == {"SYN05": [8]}


@pytest.mark.parametrize(
    ("inner", "outer"), [("pass", SAVE), (f"if step % 1000 == 0: {SAVE}", "pass")]
)
def test_saves_of_an_epoch_or_an_interval_are_left_alone(inner, outer):
    assert codes_in(LOOP.format(inner=inner, outer=outer)) == {}


def test_a_step_over_all_data_is_an_epoch():
    text = LOOP.format(inner=SAVE, outer="pass").replace("for epoch in range(3)", "if True")

    assert "SYN05" not in codes_in(text)
