import pytest

from tests.rules.source.scenario import all_codes_in

STEP = """
import torch
for x in loader:
    optimizer.zero_grad()
    loss = model(x{copy})
    loss.backward()
    optimizer.step()
{more}
"""


def test_a_training_in_fp32_on_a_gpu_is_found_once():
    assert all_codes_in(STEP.format(copy=".cuda()", more=""))["AMP01"] == [6]


@pytest.mark.parametrize(
    ("copy", "more"), [("", ""), (".cuda()", "scaler = GradScaler()"), (".cuda()", "model.half()")]
)
def test_the_cpu_and_any_lower_precision_are_left_alone(copy, more):
    assert "AMP01" not in all_codes_in(STEP.format(copy=copy, more=more))


def test_gradients_without_an_optimizer_are_no_training():
    text = STEP.format(copy=".cuda()", more="")

    assert "AMP01" in all_codes_in("def main():\n" + text.replace("\n", "\n    "))
    assert all_codes_in(text.replace("    optimizer.step()\n", "")) == {}


@pytest.mark.parametrize(
    "line",
    [
        "zeros = torch.zeros(1, device=values.device)",
        "torch.cuda.manual_seed_all(1)",
        "model.to(values.device)",
    ],
)
def test_a_training_that_follows_its_tensors_may_be_on_the_cpu(line):
    text = f"""
import torch
{line}
for x in loader:
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
"""

    assert "AMP01" not in all_codes_in(text)
