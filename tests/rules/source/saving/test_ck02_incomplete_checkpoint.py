import pytest

from tests.rules.source.scenario import codes_in

CODE = """
import torch
model.load_state_dict(old)
optimizer.step()
state = {state}
torch.save(state, {path})
"""
MODEL = "'net': model.state_dict()"


def test_an_epoch_without_an_optimizer_is_found():
    text = CODE.format(state=f"{{{MODEL}, 'epoch': epoch}}", path="'last.pt'")

    assert codes_in(text) == {"CK02": [6]}


@pytest.mark.parametrize(
    ("state", "path"),
    [
        (f"{{{MODEL}}}", "'a.pt'"),
        (f"{{{MODEL}, 'epoch': 1, 'optim': optimizer.state_dict()}}", "'a.pt'"),
        (f"{{{MODEL}, 'epoch': 1}}", "'best.pt'"),
        (f"{{{MODEL}, 'epoch': 1, **more}}", "'a.pt'"),
        ("model.state_dict()", "'a.pt'"),
    ],
)
def test_whole_checkpoints_and_those_to_use_are_left_alone(state, path):
    assert codes_in(CODE.format(state=state, path=path)) == {}
