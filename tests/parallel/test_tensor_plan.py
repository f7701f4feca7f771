"""The plan that a model brings is taken for what it is: Transformers' words for ours."""

import pytest
import torch

from flatout.parallel.task_model import block_names_of
from flatout.parallel.tensor_plan import plan_for
from flatout.records.errors import UserError
from tests.parallel.models import starcoder

OUTSIDE = {"model.embed_tokens": "rowwise", "lm_head": "colwise_gather"}


@pytest.mark.parametrize("ties", [False, True])
def test_a_model_s_own_plan_is_taken_and_what_is_tied_stays_whole(ties):
    with torch.device("meta"):
        root = starcoder(tie_word_embeddings=ties)

    styles, source = plan_for(root, block_names_of(root), 2, {})

    assert source == "the model's own"
    block = {name: style for name, style in styles.items() if name.startswith("model.layers.1.")}
    assert set(block.values()) == {"colwise", "rowwise"}
    assert block["model.layers.1.self_attn.q_proj"] == "colwise"
    assert block["model.layers.1.mlp.c_proj"] == "rowwise"
    outside = {name: style for name, style in styles.items() if ".layers." not in name}
    assert outside == ({} if ties else OUTSIDE)


def test_a_style_that_is_not_offered_is_named():
    with torch.device("meta"):
        root = starcoder()
    root._tp_plan = {"lm_head": "packed_colwise"}

    with pytest.raises(UserError, match="lm_head: unknown style 'packed_colwise'"):
        plan_for(root, block_names_of(root), 2, {})
