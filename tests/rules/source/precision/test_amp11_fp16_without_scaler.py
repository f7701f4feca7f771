import pytest

from tests.rules.source.scenario import codes_in

CODE = """
import torch
for x in loader:
    optimizer.zero_grad()
    with {autocast}:
        loss = model(x)
    {backward}
    optimizer.step()
"""


@pytest.mark.parametrize(
    "autocast", ['torch.autocast("cuda")', "torch.autocast('cuda', torch.float16)"]
)
def test_fp16_without_a_scaler_is_found(autocast):
    found = codes_in(CODE.format(autocast=autocast, backward="loss.backward()"))

    assert found == {"AMP11": [5]}


@pytest.mark.parametrize(
    ("autocast", "backward"),
    [
        ("torch.autocast('cuda', torch.bfloat16)", "loss.backward()"),
        ("torch.autocast('cuda')", "scaler.scale(loss).backward()"),
        ("torch.autocast('cuda', enabled=on)", "loss.backward()"),
        ("torch.autocast('cuda', torch.float16, False)", "loss.backward()"),
        ("torch.autocast('cpu')", "loss.backward()"),
        ("torch.autocast(kind)", "loss.backward()"),
    ],
)
def test_bf16_scaled_and_unknown_precision_is_left_alone(autocast, backward):
    assert codes_in(CODE.format(autocast=autocast, backward=backward)) == {}


@pytest.mark.parametrize(("enabled", "codes"), [("False", {"AMP10"}), ("True", {"AMP10", "AMP11"})])
def test_the_old_spelling_says_first_whether_it_is_enabled(enabled, codes):
    autocast = f"torch.cuda.amp.autocast({enabled})"

    assert codes_in(CODE.format(autocast=autocast, backward="loss.backward()")).keys() == codes


@pytest.mark.parametrize(
    "shown", ["with torch.no_grad(), torch.autocast('cuda'):", "with torch.autocast('cuda'):"]
)
def test_fp16_without_gradients_is_left_alone(shown):
    text = CODE.format(
        autocast="torch.autocast('cuda', torch.bfloat16)", backward="loss.backward()"
    )
    text += f"@torch.no_grad()\ndef sample():\n    {shown}\n        show(model(x))\n"

    assert codes_in(text) == {}
