import pytest

from tests.rules.source.scenario import all_codes_in, fixed

NEW_LOSSES = "products in TF32 have fewer digits"
STEP = """
import torch
import os

for x in loader:
    optimizer.zero_grad()
    model(x{copy}).backward()
    optimizer.step()
"""


def test_a_training_in_full_fp32_is_found_and_gets_the_switch_after_the_imports():
    text = STEP.format(copy=".cuda()")

    assert all_codes_in(text)["AMP02"] == [7]
    assert 'import os\ntorch.set_float32_matmul_precision("high")\n\nfor' in fixed(text, "AMP02")


@pytest.mark.parametrize(
    "line", ["torch.backends.cuda.matmul.allow_tf32 = False", "scaler = torch.amp.GradScaler()"]
)
def test_what_was_decided_is_left_alone(line):
    assert "AMP02" not in all_codes_in(STEP.format(copy=".cuda()") + line)


def test_the_cpu_is_left_alone():
    assert "AMP02" not in all_codes_in(STEP.format(copy=""))


def test_the_switch_is_below_the_import_of_torch():
    first = 'import os\nos.environ["A"] = "1"\n'
    text = first + STEP.format(copy=".cuda()")

    new = fixed(text, "AMP02")

    assert new.index("import torch") < new.index("torch.set_float32") < new.index("for x")


def test_a_file_that_imports_torch_in_a_function_gets_no_line_of_torch():
    text = STEP.format(copy=".cuda()").replace("import torch\n", "def f():\n    import torch\n\n")

    assert "AMP02" in all_codes_in(text)
    assert fixed(text, "AMP02") == text
