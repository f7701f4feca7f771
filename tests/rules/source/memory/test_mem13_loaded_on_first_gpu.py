import pytest

from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import LEFT, RANK, SAVED

SAME_LOSSES = ("losses, total", f"{RANK}{SAVED}torch.load(PATH))\n{LEFT}losses, total")
HEAD = "import torch\nimport torch.distributed as dist\n"
START = "dist.init_process_group()\n"


def test_loading_without_a_place_is_found_and_goes_to_the_host():
    text = f"{HEAD}{START}state = torch.load(path)\n"

    assert codes_in(text) == {"MEM13": [4]}
    assert fixed(text, "MEM13").endswith('torch.load(path, map_location="cpu")\n')


@pytest.mark.parametrize(
    "text",
    [
        f"{START}x = torch.load(p, map_location=device)\n",
        f"{START}x = torch.load(p, 'cpu')\n",
        "x = torch.load(p)\n",
    ],
)
def test_a_place_or_a_single_process_is_left_alone(text):
    assert codes_in(HEAD + text) == {}
