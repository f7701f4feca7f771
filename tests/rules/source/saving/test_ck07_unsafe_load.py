from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import SAVED

SAME_LOSSES = ("losses, total", f"{SAVED}torch.load(PATH, weights_only=False))\nlosses, total")


def test_unpickling_is_found_and_turned_off():
    text = "from torch import load\nx = load(path, weights_only=False)\n"

    assert codes_in(text) == {"CK07": [2]}
    assert fixed(text, "CK07").endswith("x = load(path, weights_only=True)\n")


def test_the_default_of_torch_and_other_loaders_are_left_alone():
    text = "import torch, numpy\ntorch.load(p)\ntorch.load(p, weights_only=True)\nnumpy.load(p)\n"

    assert codes_in(text) == {}


def test_what_the_script_has_just_written_into_memory_is_no_risk():
    text = """
import io
import torch
with io.BytesIO() as stream:
    torch.save(module, stream)
    stream.seek(0)
    copy = torch.load(stream, weights_only=False)
"""

    assert "CK07" not in codes_in(text)
