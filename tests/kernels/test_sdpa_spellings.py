"""How people write attention: each spelling is replaced, or left alone with the reason."""

import math

import numpy as np
import pytest
import torch
from torch import einsum, nn
from torch.nn import functional

from flatout.techniques.compute.sdpa_attention import use_fused_attention

LENGTH, HEADS, DEPTH = 12, 2, 8
WIDTH = HEADS * DEPTH
MASKED = object()
"""Marks a spelling whose forward takes a padding mask too."""


class Attention(nn.Module):
    """What the spellings below are made of; each is a forward of its own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.soft, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.0)
        self.heads, self.scale = HEADS, DEPTH**-0.5
        self.mix = nn.Linear(HEADS, HEADS)
        self.root = torch.sqrt(torch.FloatTensor([DEPTH]))
        self.temperature = nn.Parameter(torch.tensor(0.2))
        self.logit_scale = nn.Parameter(torch.full((HEADS, 1, 1), 2.0))
        self.table = nn.Parameter(torch.randn(2 * LENGTH - 1, HEADS))
        places = torch.arange(LENGTH)
        self.register_buffer("index", places[:, None] - places + LENGTH - 1)
        self.register_buffer("seen", torch.ones(LENGTH, LENGTH).tril())

    def split(self, x):
        return x.view(*x.shape[:2], HEADS, DEPTH)

    def parts(self, x):
        return [self.split(layer(x)).transpose(1, 2) for layer in (self.q, self.k, self.v)]

    def merged(self, y):
        return self.out(y.transpose(1, 2).reshape(y.shape[0], -1, WIDTH))


SPELLINGS, LEFT_ALONE = {}, {}


def spelled(*marks, why=""):
    def keep(forward):
        kind = type(forward.__name__, (Attention,), {"forward": forward})
        (LEFT_ALONE if why else SPELLINGS)[forward.__name__] = (kind, MASKED in marks, why)
        return forward

    return keep


@spelled()
def parts_by_index(self, x):
    b, n, c = x.shape
    qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
    q, k, v = qkv[0], qkv[1], qkv[2]
    weights = self.drop(((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1))
    return self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


@spelled()
def parts_by_unbind(self, x):
    b, n, _ = x.shape
    qkv = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.reshape(3, b * self.heads, n, -1).unbind(0)
    weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
    y = (weights @ v).view(b, self.heads, n, -1).permute(0, 2, 1, 3)
    return self.out(y.reshape(b, n, -1))


@spelled()
def parts_by_mapped_split(self, x):
    q, k, v = map(self.split, self.qkv(x).split(WIDTH, dim=-1))
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    return self.merged(((q @ k.mT) * self.scale).softmax(-1) @ v)


@spelled(MASKED)
def einsum_with_heads_after_positions(self, x, mask):
    q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
    energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
    energy = energy.masked_fill(mask == 0, float("-1e20"))
    weights = torch.softmax(energy / (WIDTH ** (1 / 2)), dim=3)
    y = torch.einsum("nhql,nlhd->nqhd", [weights, v])
    return self.out(y.reshape(x.shape[0], x.shape[1], WIDTH))


@spelled()
def einsum_with_spaces(self, x):
    q, k, v = self.parts(x)
    scale = q.shape[-1] ** -0.5
    similarity = einsum("b h i d, b h j d -> b h i j", q, k) * scale
    weights = self.drop(similarity.softmax(dim=-1))
    return self.merged(einsum("b h i j, b h j d -> b h i d", weights, v))


@spelled()
def einsum_with_dots(self, x):
    q, k, v = self.parts(x)
    weights = torch.einsum("...id,...jd->...ij", q, k).mul(self.scale).softmax(-1)
    return self.merged(torch.einsum("...ij,...jd->...id", weights, v))


@spelled()
def einsum_with_keys_first(self, x):
    q, k, v = self.parts(x)
    weights = torch.einsum("bhjd,bhid->bhij", k, q).softmax(-1)
    return self.merged(torch.einsum("bhjd,bhij->bhid", v, weights))


@spelled()
def einsum_with_one_head_of_keys(self, x):
    q, k, v = self.split(self.q(x)).transpose(1, 2), self.k(x)[..., :DEPTH], self.v(x)[..., :DEPTH]
    weights = torch.einsum("bhid,bjd->bhij", q, k).softmax(-1)
    return self.merged(torch.einsum("bhij,bjd->bhid", weights, v))


@spelled()
def channels_first_scaled_on_both_sides(self, x):
    b, n, c = x.shape
    depth = c // self.heads
    q, k, v = self.qkv(x).transpose(1, 2).reshape(b * self.heads, depth * 3, n).split(depth, dim=1)
    scale = 1 / math.sqrt(math.sqrt(depth))
    weights = torch.einsum("bct,bcs->bts", q * scale, k * scale)
    weights = torch.softmax(weights.float(), dim=-1).type(weights.dtype)
    y = torch.einsum("bts,bcs->bct", weights, v)
    return self.out(y.reshape(b, -1, n).transpose(1, 2))


@spelled()
def values_times_turned_weights(self, x):
    q, k, v = (layer(x).transpose(1, 2) for layer in (self.q, self.k, self.v))
    weights = self.soft(torch.bmm(q.permute(0, 2, 1), k))
    return self.out(torch.bmm(v, weights.permute(0, 2, 1)).transpose(1, 2))


@spelled()
def softmax_in_float(self, x):
    q, k, v = self.parts(x)
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(DEPTH)
    return self.merged(functional.softmax(scores.float(), dim=-1).type_as(q) @ v)


@spelled(MASKED)
def softmax_of_a_type_and_a_bias(self, x, mask):
    q, k, v = self.parts(x)
    weights = torch.matmul(q, k.transpose(2, 3)) * self.scale
    weights = weights + (1.0 - mask) * torch.finfo(q.dtype).min
    weights = functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = functional.dropout(weights, p=0.0, training=self.training)
    return self.merged(torch.matmul(weights, v))


@spelled(MASKED)
def filled_with_the_least_number_of_the_type(self, x, mask):
    q, k, v = self.parts(x)
    scores = q @ k.transpose(-2, -1)
    scores = scores.masked_fill(~mask.bool(), torch.finfo(scores.dtype).min)
    return self.merged(scores.softmax(-1) @ v)


@spelled(MASKED)
def filled_in_place_as_a_statement(self, x, mask):
    q, k, v = self.parts(x)
    scores = q @ k.transpose(-2, -1)
    scores.masked_fill_(mask == 0, -torch.finfo(scores.dtype).max)
    return self.merged(scores.softmax(-1) @ v)


@spelled()
def mask_made_in_the_forward(self, x):
    q, k, v = self.parts(x)
    n = x.size(1)
    past = torch.tril(torch.ones(n, n, device=x.device))
    scores = (q @ k.transpose(-2, -1)).masked_fill(past == 0, float("-inf"))
    return self.merged(scores.softmax(-1) @ v)


@spelled()
def future_added_as_numbers(self, x):
    q, k, v = self.parts(x)
    n = x.shape[1]
    future = torch.triu(torch.full((n, n), float("-inf"), device=x.device), diagonal=1)
    return self.merged(((q @ k.transpose(-2, -1)) * self.scale + future).softmax(-1) @ v)


@spelled()
def chosen_by_where(self, x):
    q, k, v = self.parts(x)
    scores = q @ k.transpose(-1, -2)
    least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=x.device)
    seen = self.seen[: x.size(1), : x.size(1)].bool()
    return self.merged(torch.where(seen, scores, least).softmax(-1) @ v)


@spelled(MASKED)
def hidden_by_subtraction(self, x, mask):
    q, k, v = self.parts(x)
    return self.merged((q @ k.transpose(-1, -2) - 1e9 * (1 - mask)).softmax(-1) @ v)


@spelled()
def product_and_factor_in_one(self, x):
    q, k, v = (layer(x) for layer in (self.q, self.k, self.v))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=self.scale)
    return self.out(torch.bmm(scores.softmax(dim=-1), v))


@spelled()
def scaled_by_a_tensor(self, x):
    q, k, v = self.parts(x)
    weights = torch.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) / self.root, dim=-1)
    return self.merged(torch.matmul(weights, v))


@spelled()
def scaled_by_a_tensor_made_here(self, x):
    q, k, v = self.parts(x)
    scores = torch.matmul(q, k.transpose(-2, -1)) / torch.sqrt(torch.tensor(DEPTH))
    return self.merged(functional.softmax(scores, dim=-1) @ v)


@spelled()
def scaled_by_numpy(self, x):
    q, k, v = self.parts(x)
    scores = q @ k.transpose(-2, -1) / np.sqrt(k.size(-1)) * np.power(4.0, 0.5)
    return self.merged(functional.softmax(scores, dim=-1) @ v)


@spelled(MASKED)
def a_bias_from_a_mask_after_the_factor(self, x, mask):
    q, k, v = self.parts(x)
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(WIDTH // HEADS) + (1 - mask) * -1e4
    return self.merged(torch.matmul(self.drop(self.soft(scores)), v))


@spelled()
def widths_divided_in_whole_numbers_and_a_mask_turned_round(self, x):
    b, n, c = x.shape
    q, k, v = self.qkv(x).split(c, dim=2)
    q, k, v = (y.view(b, n, HEADS, c // HEADS).transpose(1, 2) for y in (q, k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(c // HEADS)
    scores = scores.masked_fill(~self.seen.bool()[:n, :n], float("-inf"))
    return self.merged((functional.softmax(scores, dim=-1) @ v).contiguous())


@spelled()
def scaled_by_a_learned_temperature(self, x):
    q, k, v = self.parts(x)
    scores = torch.matmul(q, k.transpose(-1, -2)) * self.temperature.exp()
    return self.merged(self.soft(scores) @ v)


@spelled()
def scaled_for_each_head(self, x):
    q, k, v = self.parts(x)
    scores = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1)
    return self.merged((scores * torch.clamp(self.logit_scale, max=4.0).exp()).softmax(-1) @ v)


@spelled()
def a_learned_bias_of_places(self, x):
    q, k, v = self.parts(x)
    bias = self.table[self.index.view(-1)].view(LENGTH, LENGTH, -1).permute(2, 0, 1)
    weights = self.soft((q * self.scale) @ k.transpose(-2, -1) + bias.contiguous().unsqueeze(0))
    return self.merged(weights @ v)


@spelled()
def a_bias_below_the_factor(self, x):
    q, k, v = self.parts(x)
    bias = self.table[self.index].permute(2, 0, 1)
    return self.merged((((q @ k.transpose(-2, -1)) + bias) * self.scale).softmax(-1) @ v)


@spelled()
def rows_and_columns_of_five_dimensions(self, x):
    b, n, _ = x.shape
    q, k, v = (
        layer(x).view(b, 3, n // 3, HEADS, DEPTH).transpose(2, 3)
        for layer in (self.q, self.k, self.v)
    )
    y = (q @ k.transpose(-2, -1) * self.scale).softmax(-1) @ v
    return self.out(y.transpose(2, 3).reshape(b, n, WIDTH))


@spelled()
def a_bias_for_each_row_of_five_dimensions(self, x):
    b, n, _ = x.shape
    q, k, v = (
        layer(x).view(b, 3, n // 3, HEADS, DEPTH).transpose(2, 3)
        for layer in (self.q, self.k, self.v)
    )
    bias = self.table[: 3 * HEADS].view(3, HEADS, 1, 2).repeat(1, 1, 1, n // 6)
    y = (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v
    return self.out(y.transpose(2, 3).reshape(b, n, WIDTH))


def by_hand(query, key, value, mask=None, dropout=None):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = scores.softmax(dim=-1)
    if dropout is not None:
        weights = dropout(weights)
    return torch.matmul(weights, value), weights


@spelled(MASKED)
def by_a_function_whose_weights_are_dropped(self, x, mask):
    y, _ = by_hand(*self.parts(x), mask=mask, dropout=self.drop)
    return self.merged(y)


@spelled()
def sizes_that_are_checked(self, x, *_, **kwargs):
    assert x.size(1) <= LENGTH
    q, k, v = self.parts(x)
    scores = q @ k.transpose(-2, -1) / int(k.size(-1)) ** 0.5
    return self.merged(scores.softmax(-1) @ v)


@spelled(why="sets weights on the module")
def weights_kept(self, x):
    y, self.weights = by_hand(*self.parts(x))
    return self.merged(y)


@spelled(why="makes a tensor of values")
def a_tensor_that_a_trace_would_keep(self, x):
    q, k, v = self.parts(x)
    return self.merged((q @ k.transpose(-2, -1) / torch.FloatTensor([2.0])).softmax(-1) @ v)


@spelled(why="weights are used again")
def weights_returned(self, x):
    y, weights = by_hand(*self.parts(x))
    return self.merged(y), weights


@spelled(why="no softmax(q @ k^T) @ v")
def heads_that_talk(self, x):
    q, k, v = self.parts(x)
    scores = self.mix((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return self.merged(scores.softmax(-1) @ v)


@spelled(why="no softmax(q @ k^T) @ v")
def linear_attention(self, x):
    q, k, v = self.parts(x)
    return self.merged(q @ (k.softmax(dim=-2).transpose(-2, -1) @ v))


@spelled(why="no softmax(q @ k^T) @ v")
def softmax_over_the_queries(self, x):
    q, k, v = self.parts(x)
    return self.merged(functional.softmax(q @ k.transpose(-2, -1), dim=-2) @ v)


@spelled(why="no softmax(q @ k^T) @ v")
def scores_times_a_mask(self, x):
    q, k, v = self.parts(x)
    seen = self.seen[: x.size(1), : x.size(1)]
    return self.merged((q @ k.transpose(-2, -1) * seen - 1e4 * (1 - seen)).softmax(-1) @ v)


@spelled(why="a tensor is asked for a number")
def chosen_by_a_value(self, x):
    q, k, v = self.parts(x)
    scores = q @ k.transpose(-2, -1)
    return self.merged((scores if x.sum() > 0 else scores / 2).softmax(-1) @ v)


@spelled(why="no softmax(q @ k^T) @ v")
def another_shape_in_between(self, x):
    b, n, _ = x.shape
    q, k, v = (y.reshape(b * HEADS, n, DEPTH) for y in self.parts(x))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, HEADS, n, n) + self.index
    y = torch.bmm(scores.view(b * HEADS, n, n).softmax(-1), v)
    return self.merged(y.view(b, HEADS, n, DEPTH))


def inputs(is_masked, length=LENGTH):
    torch.manual_seed(1)
    mask = torch.ones(3, 1, 1, length)
    mask[1, ..., 2 * length // 3 :] = 0
    x = torch.randn(3, length, WIDTH)
    return (x, mask) if is_masked else (x,)


def built(kind):
    torch.manual_seed(0)
    return kind().train()


def gradients(module, *args):
    output = module(*args)
    output.square().sum().backward()
    return [output, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.fixture
def fused_calls(monkeypatch):
    calls = []
    operation = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda *a, **k: calls.append((a, k)) or operation(*a, **k),
    )
    return calls


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_replaced_and_computes_the_same(name, fused_calls):
    kind, is_masked, _ = SPELLINGS[name]
    plain, fused = built(kind), built(kind)

    outcome = use_fused_attention(fused, *inputs(is_masked))

    assert outcome == {"": ""}
    fused_calls.clear()
    found, expected = (gradients(one, *inputs(is_masked)) for one in (fused, plain))
    assert len(fused_calls) == 1
    assert all(x.dim() == 4 and x.stride(-1) == 1 for x in fused_calls[0][0])
    assert len(found) == len(expected)
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, expected, strict=True)
    )


def test_other_lengths_compute_the_same_too(fused_calls):
    kind, _, _ = SPELLINGS["mask_made_in_the_forward"]
    plain, fused = built(kind), built(kind)
    use_fused_attention(fused, *inputs(is_masked=False))
    fused_calls.clear()

    x = inputs(is_masked=False, length=7)[0]

    assert torch.allclose(fused(x), plain(x), atol=1e-6)
    assert fused_calls[0][1]["is_causal"]


def test_a_size_on_which_a_branch_depends_goes_back_to_the_scripts_own_code(fused_calls):
    kind, _, _ = SPELLINGS["sizes_that_are_checked"]
    fused = built(kind)
    use_fused_attention(fused, *inputs(is_masked=False))
    fused_calls.clear()

    with pytest.raises(AssertionError):
        fused(*inputs(is_masked=False, length=LENGTH + 1))

    assert not fused_calls


def test_queries_in_float_beside_values_in_autocast_are_one_operator(fused_calls):
    kind, _, _ = SPELLINGS["scaled_for_each_head"]
    fused = built(kind)

    with torch.autocast("cpu", torch.bfloat16):
        outcome = use_fused_attention(fused, *inputs(is_masked=False))
        fused_calls.clear()
        found = gradients(fused, *inputs(is_masked=False))

    assert outcome == {"": ""}
    assert len(fused_calls) == 1
    assert all(tensor.isfinite().all() for tensor in found)


def test_what_cannot_be_compared_in_float64_is_left_alone():
    def single(self, x):
        assert x.dtype != torch.float64, "too precise"
        q, k, v = self.parts(x)
        return self.merged((q @ k.transpose(-2, -1)).softmax(-1) @ v)

    module = built(type("Single", (Attention,), {"forward": single}))

    outcome = use_fused_attention(module, *inputs(is_masked=False))

    assert "does not run in float64: too precise" in outcome[""]


class Product(nn.Module):
    """Returns its weights, as many do; who calls it decides whether they are seen."""

    def __init__(self):
        super().__init__()
        self.drop, self.temperature = nn.Dropout(0.0), DEPTH**0.5

    def forward(self, q, k, v):
        weights = torch.matmul(q / self.temperature, k.transpose(2, 3))
        weights = self.drop(functional.softmax(weights, dim=-1))
        return torch.matmul(weights, v), weights


class Calling(Attention):
    """Passes the weights on to its caller."""

    def __init__(self):
        super().__init__()
        self.attention = Product()
        del self.soft

    def forward(self, x):
        y, weights = self.attention(*self.parts(x))
        return self.merged(y), weights


class Dropping(Calling):
    """Drops the weights."""

    def forward(self, x):
        y, _ = self.attention(*self.parts(x))
        return self.merged(y)


class Lent(nn.Module):
    """Is given the dropout by its caller."""

    def forward(self, q, k, v, mask=None, dropout=None):
        return by_hand(q, k, v, mask, dropout)


class Lending(Calling):
    """Hands a module over."""

    def __init__(self):
        super().__init__()
        self.attention = Lent()

    def forward(self, x):
        y, _ = self.attention(*self.parts(x), dropout=self.drop)
        return self.merged(y)


class Stack(nn.Module):
    """Drops the weights of its layers, unless it is asked for them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Calling(), Calling()])

    def forward(self, x, *, is_watched=False):
        seen = []
        for layer in self.layers:
            x, weights = layer(x)
            seen += [weights] if is_watched else []
        return (x, seen) if is_watched else x


@pytest.mark.parametrize(("kind", "count"), [(Dropping, 1), (Lending, 1), (Stack, 2)])
def test_weights_that_a_caller_drops_are_not_computed(kind, count, fused_calls):
    plain, fused = built(kind), built(kind)

    outcome = use_fused_attention(fused, *inputs(is_masked=False))

    assert [*outcome.values()] == [""] * count
    fused_calls.clear()
    found, expected = (gradients(one, *inputs(is_masked=False)) for one in (fused, plain))
    assert len(fused_calls) == count
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))


def test_weights_that_are_asked_for_later_are_those_of_the_script():
    plain, fused = built(Stack), built(Stack)
    use_fused_attention(fused, *inputs(is_masked=False))

    _, found = fused(*inputs(is_masked=False), is_watched=True)

    _, expected = plain(*inputs(is_masked=False), is_watched=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_hook_that_looks_at_the_weights_still_sees_them(fused_calls):
    fused, seen = built(Dropping), []
    use_fused_attention(fused, *inputs(is_masked=False))
    fused_calls.clear()

    fused.attention.register_forward_hook(lambda _, __, output: seen.append(output[1]))
    fused(*inputs(is_masked=False))

    assert len(seen) == 1
    assert not fused_calls


def test_weights_that_no_caller_drops_are_left_alone():
    outcome = use_fused_attention(built(Calling), *inputs(is_masked=False))

    assert "weights are used again" in outcome["attention"]


rearrange = einops_einsum = None  # set by the test, where einops is installed


def by_rearrange(self, x):
    qkv = self.qkv(x).chunk(3, dim=-1)
    q, k, v = (rearrange(y, "b n (h d) -> b h n d", h=self.heads) for y in qkv)
    weights = self.drop(self.soft(torch.matmul(q, k.transpose(-1, -2)) * self.scale))
    return self.out(rearrange(torch.matmul(weights, v), "b h n d -> b n (h d)"))


def by_rearranged_channels(self, x):
    qkv = self.qkv(x).transpose(1, 2).chunk(3, dim=1)
    q, k, v = map(lambda y: rearrange(y, "b (h c) n -> b h c n", h=self.heads), qkv)  # noqa: C417
    weights = einsum("b h d i, b h d j -> b h i j", q * self.scale, k).softmax(dim=-1)
    y = einsum("b h i j, b h d j -> b h i d", weights, v)
    return self.out(rearrange(y, "b h n d -> b n (h d)"))


def by_rearranged_weights(self, x):
    q, k, v = (rearrange(layer(x), "b n c -> b c n") for layer in (self.q, self.k, self.v))
    weights = torch.einsum("bij,bjk->bik", rearrange(q, "b c n -> b n c"), k)
    weights = rearrange(functional.softmax(weights * self.scale, dim=2), "b i j -> b j i")
    return self.out(rearrange(torch.einsum("bij,bjk->bik", v, weights), "b c n -> b n c"))


def by_named_einsum(self, x):
    q, k, v = self.parts(x)
    scores = einops_einsum(q, k, "... queries depth, ... keys depth -> ... queries keys")
    weights = (scores * self.scale).softmax(-1)
    return self.merged(
        einops_einsum(weights, v, "... queries keys, ... keys depth -> ... queries depth")
    )


@pytest.mark.parametrize(
    "forward", [by_rearrange, by_rearranged_channels, by_rearranged_weights, by_named_einsum]
)
def test_functions_of_einops_are_seen(forward, monkeypatch):
    einops = pytest.importorskip("einops")
    monkeypatch.setitem(globals(), "rearrange", einops.rearrange)
    monkeypatch.setitem(globals(), "einops_einsum", einops.einsum)
    kind = type("Rearranging", (Attention,), {"forward": forward})
    plain, fused = built(kind), built(kind)

    outcome = use_fused_attention(fused, *inputs(is_masked=False))

    assert outcome == {"": ""}
    found, expected = (gradients(one, *inputs(is_masked=False)) for one in (fused, plain))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_spelling_that_is_left_alone_says_why(name):
    kind, is_masked, why = LEFT_ALONE[name]
    module = built(kind)

    outcome = use_fused_attention(module, *inputs(is_masked))

    assert why in outcome[""]
    assert "forward" not in vars(module)
    assert not any(isinstance(value, torch.fx.Proxy) for value in vars(module).values())
