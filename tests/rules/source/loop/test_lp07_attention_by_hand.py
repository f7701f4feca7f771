import pytest

from tests.rules.source.scenario import codes_in

FORWARD = """
import torch
import torch.nn.functional as F
class Attention(torch.nn.Module):
    def forward(self, q, k, v, mask):
        att = {scores}
        att = att.masked_fill(mask, -1e9)
        att = {softmax}
        att = self.dropout(att)
        y = {product}
        return {result}
"""
USUAL = {
    "scores": "(q @ k.transpose(-2, -1)) * self.scale",
    "softmax": "F.softmax(att, dim=-1)",
    "product": "att @ v",
    "result": "y",
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scores": "torch.matmul(q, k.transpose(-1, -2)) / 8"},
        {"softmax": "att.float().softmax(-1).to(q.dtype)"},
        {"product": "torch.matmul(att, v)"},
        {"product": "self.dropout(att) @ v"},
    ],
)
def test_attention_by_hand_is_found_at_its_softmax(changes):
    assert codes_in(FORWARD.format(**{**USUAL, **changes})) == {"LP07": [8]}


@pytest.mark.parametrize(
    "changes",
    [
        {"result": "y, att"},
        {"scores": "q @ k"},
        {"softmax": "att.sigmoid()"},
        {"product": "v @ att"},
        {"product": "F.scaled_dot_product_attention(q, k, v)"},
    ],
)
def test_weights_that_are_returned_and_other_products_are_left_alone(changes):
    assert codes_in(FORWARD.format(**{**USUAL, **changes})) == {}
