import pytest

from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import FORWARD

SAME_LOSSES = (FORWARD, f"        with torch.cpu.amp.autocast():\n    {FORWARD}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.cuda.amp.autocast()", 'torch.autocast("cuda")'),
        ("torch.cuda.amp.autocast(enabled=on)", 'torch.autocast("cuda", enabled=on)'),
        (
            "torch.cuda.amp.GradScaler(init_scale=2.0)",
            'torch.amp.GradScaler("cuda", init_scale=2.0)',
        ),
        ("torch.cpu.amp.autocast()", 'torch.autocast("cpu")'),
    ],
)
def test_the_old_names_become_the_new_ones_by_a_safe_fix(before, after):
    text = f"import torch\nx = {before}\n"

    assert codes_in(text) == {"AMP10": [2]}
    assert fixed(text, "AMP10", suggested=False) == f"import torch\nx = {after}\n"


def test_torch_is_imported_where_only_the_old_name_was():
    text = "from torch.cuda.amp import autocast\nwith autocast():\n    pass\n"

    assert fixed(text, "AMP10", suggested=False).splitlines() == [
        "from torch.cuda.amp import autocast",
        "import torch",
        'with torch.autocast("cuda"):',
        "    pass",
    ]


def test_the_new_names_and_other_functions_are_left_alone():
    assert codes_in('import torch\nwith torch.autocast("cuda"):\n    pass\n') == {}
    assert codes_in("import torch\nfrom mine import autocast\nautocast()\n") == {}


def test_what_older_versions_of_torch_get_is_left_alone():
    text = """
import torch
try:
    scaler = torch.amp.GradScaler("cuda")
except AttributeError:
    scaler = torch.cuda.amp.GradScaler()
"""
    assert codes_in(text) == {}


def test_an_import_in_another_function_does_not_bring_torch_here():
    text = "from torch.cuda.amp import autocast\ndef f():\n    import torch\nautocast()\n"

    assert "autocast\nimport torch\ndef f" in fixed(text, "AMP10", suggested=False)
