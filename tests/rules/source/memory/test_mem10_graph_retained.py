import pytest

from tests.rules.source.scenario import codes_in, fixed

SAME_LOSSES = ("loss.backward()", "loss.backward(retain_graph=True)")
STEP = """
import torch
for x in loader:
    optimizer.zero_grad()
    loss = model(x)
    {backward}
    optimizer.step()
"""
KEEP = "loss.backward(retain_graph=True)"


def test_a_graph_that_is_kept_for_nothing_is_found_and_freed():
    text = STEP.format(backward=KEEP)

    assert codes_in(text) == {"MEM10": [6]}
    assert fixed(text, "MEM10") == STEP.format(backward="loss.backward()")


@pytest.mark.parametrize(
    "backward",
    [
        "loss.backward()",
        f"{KEEP}\n    other.backward()",
        f"{KEEP}\n    g = torch.autograd.grad(loss, x)",
        f"hidden = model(x)\n    {KEEP}",
        "loss.backward(retain_graph=args.keep)",
        "loss.backward(retain_graph=True, create_graph=True)",
        f"for loss in losses: {KEEP}",
    ],
)
def test_graphs_that_may_be_used_again_are_left_alone(backward):
    assert "MEM10" not in codes_in(STEP.format(backward=backward))


def test_passes_over_the_same_data_may_need_a_graph_of_before():
    text = STEP.format(backward=KEEP).replace("for x in loader", "for _ in range(passes)")

    assert "MEM10" not in codes_in(text)


def test_a_state_that_a_step_takes_over_under_any_name_is_left_alone():
    text = """
import torch
h = None
for x in loader:
    output, h = cell(x, h)
    loss = output.mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
"""

    assert "MEM10" not in codes_in(text)
    assert "MEM10" in codes_in(text.replace("cell(x, h)", "cell(x)"))
