import pytest

from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import FORWARD

SAME_LOSSES = (FORWARD, f'        x = x + torch.ones(64, 64).to("cuda")[:8, :8]\n{FORWARD}')


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.zeros(200, 30).cuda()", 'torch.zeros(200, 30, device="cuda")'),
        ("torch.ones(n).to(device)", "torch.ones(n, device=device)"),
        ("torch.full((2000,), 1.0,).to('cuda:1')", "torch.full((2000,), 1.0, device='cuda:1',)"),
        (
            "torch.eye(3000, dtype=torch.half).cuda(1)",
            "torch.eye(3000, dtype=torch.half, device=1)",
        ),
    ],
)
def test_what_is_equal_everywhere_is_made_on_the_device_by_a_safe_fix(before, after):
    text = f"import torch\nx = {before}  # kept\n"

    assert codes_in(text) == {"SYN10": [2]}
    assert fixed(text, "SYN10", suggested=False) == f"import torch\nx = {after}  # kept\n"


def test_random_numbers_of_another_generator_are_only_suggested():
    text = "import torch\nx = torch.rand(3000).cuda()\n"

    assert fixed(text, "SYN10", suggested=False) == text
    assert 'torch.rand(3000, device="cuda")' in fixed(text, "SYN10")


@pytest.mark.parametrize(
    "expression",
    [
        "torch.zeros(3, device=device)",
        "torch.zeros(3).to(torch.float16)",
        "torch.zeros(3).to(device, torch.half)",
        "torch.zeros(3).to(other.dtype)",
        "torch.zeros(*shape).to('cpu')",
        "loss.cuda()",
    ],
)
def test_other_conversions_are_left_alone(expression):
    assert "SYN10" not in codes_in(f"import torch\nx = {expression}\n")


@pytest.mark.parametrize("size", ["1", "(1,)", "2, 3", "8, 128"])
def test_a_scalar_or_a_counter_costs_no_more_than_a_launch(size):
    assert "SYN10" not in codes_in(f"import torch\nx = torch.zeros({size}).cuda()\n")


@pytest.mark.parametrize(
    "made", ["arange(0, 100_000)", "randint(0, 10, (4096, 64))", "full((2000, 9), 0)"]
)
def test_a_zero_among_the_arguments_makes_no_small_tensor(made):
    assert "SYN10" in codes_in(f"import torch\nx = torch.{made}.cuda()\n")
