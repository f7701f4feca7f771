from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from flatout.records.errors import NotApplicable
from flatout.techniques.compute.packed_attention import PackedAttention
from flatout.techniques.compute.packed_attention import sample_attention as docs
from flatout.techniques.compute.packed_attention.sample_attention import (
    attend_inside,
    documents_of,
    find_difference,
)
from flatout.techniques.data.sequence_packing import packing
from tests.techniques.data.test_sequence_packing import (
    causal_model,
    loss_and_gradients,
    padded,
)
from tests.techniques.facts import gpu, machine

PROMISE = "this module compares the gradients"

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]])


def heads(count=4, **changes):
    generator = torch.Generator().manual_seed(count)
    return torch.randn(2, count, 8, 16, generator=generator, **changes)


def mask():
    numbers = documents_of(POSITIONS).numbers.view(2, 8)
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return same & torch.ones(8, 8, dtype=torch.bool).tril()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_inside_of_documents_is_what_the_mask_gives(kv_heads):
    q, k, v = heads(), heads(kv_heads) * 2, heads(kv_heads)
    given = documents_of(POSITIONS)

    found = attend_inside(q, k, v, given, scale=0.3)

    k4, v4 = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
    expected = functional.scaled_dot_product_attention(q, k4, v4, mask(), scale=0.3)
    torch.testing.assert_close(found, expected)
    assert find_difference(q, k, v, mask(), given, how="padded", scale=0.3) == ""
    assert not found.isnan().any()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_masks_of_blocks_give_the_same_forward_on_the_cpu_and_no_backward():
    q, k, v = heads(), heads() * 2, heads()
    given = documents_of(POSITIONS)

    found = attend_inside(q, k, v, given, how="flex")

    torch.testing.assert_close(found, attend_inside(q, k, v, given))
    why = find_difference(q, k, v, mask(), given, how="flex", scale=None)
    assert why.startswith("flex does not run here")


def test_a_mask_that_hides_more_is_found():
    window = mask() & torch.ones(8, 8, dtype=torch.bool).triu(-2)

    why = find_difference(
        heads(), heads(), heads(), window, documents_of(POSITIONS), how="padded", scale=None
    )

    assert "differs by" in why


def test_rows_of_single_tokens_are_their_own_values():
    q = heads()

    assert torch.equal(attend_inside(q, q, q, documents_of(torch.zeros(2, 8))), q)


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(
        docs, "_padded", lambda *args, inner=docs._padded: made.append(args) or inner(*args)
    )
    return made


def test_loss_and_gradients_of_a_padded_batch_stay_the_same(calls):
    plain, changed = causal_model("sdpa"), causal_model("sdpa")
    operator = functional.scaled_dot_product_attention
    lever = PackedAttention()

    call = lever.forward(changed, changed)
    found, slopes = loss_and_gradients(changed, call)
    proving = len(calls)
    found, slopes = loss_and_gradients(changed, call)

    expected, expected_slopes = loss_and_gradients(plain, plain)
    assert found.logits.shape[0] == 2
    torch.testing.assert_close(found.loss, expected.loss)
    for one, other in zip(slopes, expected_slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (proving, len(calls) - proving) == (4, 2)
    assert lever.end() == "2 attentions stay inside of each text (padded)"
    assert functional.scaled_dot_product_attention is operator


def test_rows_that_something_else_packed_are_taken_as_they_are(calls):
    root = causal_model("sdpa")
    call = packing(PackedAttention().forward(root, root))

    made, _ = loss_and_gradients(root, call)

    assert made.logits.shape[0] == 2
    assert calls


def test_without_packed_rows_it_says_so():
    root = causal_model("sdpa")
    lever = PackedAttention()
    lever.forward(root, root)

    with pytest.raises(NotApplicable, match="no packed rows"):
        lever.end()


def test_other_attention_and_checkpointed_models_are_left_alone():
    checkpointed = causal_model("sdpa")
    checkpointed.model.layers[0].gradient_checkpointing = True

    with pytest.raises(NotApplicable, match="torch's own operator"):
        PackedAttention().forward(print, causal_model("eager"))
    with pytest.raises(NotApplicable, match="computed again"):
        PackedAttention().forward(print, checkpointed)


def test_it_is_offered_with_packing_and_its_kernels_on_a_gpu():
    facts = padded(0.5)
    on_gpu = replace(facts, device_kind="cuda")

    assert PackedAttention.candidates(facts, machine()) == [PackedAttention()]
    found = PackedAttention.candidates(on_gpu, machine(device=gpu()))
    assert [lever.how for lever in found] == ["padded", "varlen", "flex"]
    assert PackedAttention.candidates(padded(0.1), machine()) == ()
    assert PackedAttention().predict(facts, machine()).step_ms == pytest.approx(-45.0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns about itself
@pytest.mark.parametrize("how", ["padded", "varlen", "flex"])
def test_on_a_gpu_outputs_and_gradients_are_what_the_mask_gives(how):
    if how == "varlen":
        pytest.importorskip("torch.nn.attention.varlen")
    lengths = [100, 156], [30, 200, 26]
    rows = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    positions = torch.stack(rows).cuda()
    given = documents_of(positions)
    numbers = given.numbers.view(2, 256)
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    inside = same & torch.ones(256, 256, dtype=torch.bool, device="cuda").tril()
    q, k, v = torch.randn(3, 2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)

    assert find_difference(q, k, v, inside, given, how=how, scale=None) == ""
    assert find_difference(q, k, v, inside.triu(-2), given, how=how, scale=None) != ""
