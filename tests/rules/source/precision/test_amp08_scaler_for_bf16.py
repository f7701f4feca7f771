import pytest

from tests.rules.source.scenario import codes_in

CODE = """
import torch
dtype = torch.{dtype}
scaler = torch.amp.GradScaler("cuda"{more})
with torch.autocast("cuda", dtype):
    loss = model(x)
"""


def test_a_scaler_for_bf16_is_found():
    assert codes_in(CODE.format(dtype="bfloat16", more="")) == {"AMP08": [4]}


@pytest.mark.parametrize(("dtype", "more"), [("float16", ""), ("bfloat16", ", enabled=args.fp16")])
def test_a_scaler_for_fp16_or_with_a_flag_is_left_alone(dtype, more):
    assert codes_in(CODE.format(dtype=dtype, more=more)) == {}
