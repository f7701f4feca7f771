import pytest

from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import CHECKPOINT

SAME_LOSSES = ("model(x), y", f"{CHECKPOINT}(model[1:], model[0](x), use_reentrant=True), y")
HEAD = "import torch\nimport torch.utils.checkpoint as cp\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cp.checkpoint(block, x)", "cp.checkpoint(block, x, use_reentrant=False)"),
        ("cp.checkpoint(*args)", "cp.checkpoint(*args, use_reentrant=False)"),
        ("cp.checkpoint(f, x, use_reentrant=True)", "cp.checkpoint(f, x, use_reentrant=False)"),
    ],
)
def test_the_old_form_is_found_and_replaced(before, after):
    assert codes_in(f"{HEAD}y = {before}\n") == {"MEM11": [3]}
    assert fixed(f"{HEAD}y = {before}\n", "MEM11") == f"{HEAD}y = {after}\n"


@pytest.mark.parametrize(
    "call",
    ["cp.checkpoint(f, x, use_reentrant=False)", "cp.checkpoint(f, x, **kwargs)", "checkpoint(f)"],
)
def test_the_new_form_and_other_functions_are_left_alone(call):
    assert codes_in(f"{HEAD}y = {call}\n") == {}
