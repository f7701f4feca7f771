"""What a trace would bake in is found: draws, and values that the script may change later."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import nn

from flatout.techniques.compute.sdpa_attention import use_fused_attention

WIDTH = 16
DRAWS = {
    "random": random.random,
    "numpy.random": np.random.random,
    "torch": lambda: torch.rand(1).item(),
}
TEMPERATURE = 1.0


class Attention(nn.Module):
    """What both forwards below project with."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)


class Skipping(Attention):
    """Leaves itself out now and then, as a stochastic depth does."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        if self.draw() < 1e-9:
            return x
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v


class Configured(Attention):
    """Reads what objects hold, a private attribute and a global."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(temperature=1.0, name="a")
        self.table = {"temperature": 1.0}
        self._sharpness = 1.0

    def forward(self, x):
        scale = self.config.temperature * self.table["temperature"] * self._sharpness * TEMPERATURE
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return ((q @ k.transpose(-2, -1)) * scale).softmax(dim=-1) @ v


def seeded():
    """Put every stream to the same place and return an input."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    return torch.ones(2, 6, WIDTH)


def built(make):
    torch.manual_seed(0)
    return make().train()


@pytest.mark.parametrize("stream", DRAWS)
def test_a_forward_that_draws_by_itself_is_left_alone_and_the_stream_put_back(stream):
    draw = DRAWS[stream]
    module = built(lambda: Skipping(draw))
    seeded()
    expected = draw()
    x = seeded()

    outcome = use_fused_attention(module, x)

    assert outcome == {"": f"its forward draws from {stream} on its own"}
    assert "forward" not in vars(module)
    assert draw() == expected


def anneal_config(module, _):
    module.config.temperature = 2.0


def anneal_table(module, _):
    module.table["temperature"] = 2.0


def anneal_private(module, _):
    module._sharpness = 2.0


def anneal_global(_, monkeypatch):
    monkeypatch.setitem(globals(), "TEMPERATURE", 2.0)


@pytest.mark.parametrize("anneal", [anneal_config, anneal_table, anneal_private, anneal_global])
def test_a_value_that_anneals_goes_back_to_the_scripts_own_code(anneal, monkeypatch):
    plain, fused = built(Configured), built(Configured)
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    assert use_fused_attention(fused, x) == {"": ""}

    anneal(plain, monkeypatch)
    anneal(fused, monkeypatch)

    assert torch.equal(fused(x), plain(x))


def count_steps(module):
    module.config.global_step = 7


def note_numbers(module):
    module.table["entropy"] = torch.ones(2)


def leave(_):
    pass


@pytest.mark.parametrize("change", [leave, count_steps, note_numbers])
def test_what_stays_as_it_was_goes_on_fused(change, monkeypatch):
    calls = []
    fused = built(Configured)
    fused.config.global_step, fused.table["entropy"] = 0, 0.0
    operation = nn.functional.scaled_dot_product_attention
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    use_fused_attention(fused, x)
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda *a, **k: calls.append(k) or operation(*a, **k),
    )

    change(fused)
    fused(x)

    assert len(calls) == 1


def test_a_value_that_becomes_a_tensor_goes_back_to_the_scripts_own_code():
    plain, fused = built(Configured), built(Configured)
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    use_fused_attention(fused, x)
    for module in (plain, fused):
        module.table["temperature"] = torch.full((6, 1), 2.0)

    assert torch.equal(fused(x), plain(x))


def test_new_globals_of_the_script_compile_nothing_anew(monkeypatch):
    fused = built(Configured)
    x = torch.randn(2, 6, WIDTH)
    use_fused_attention(fused, x)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(fused, backend=counter, fullgraph=True)

    for number in range(3):
        monkeypatch.setitem(globals(), f"LOSS_{number}", 1.0)
        compiled(x)

    assert counter.frame_count == 1


def test_a_compiler_goes_through_it_in_one_graph():
    fused = built(Configured)
    x = torch.randn(2, 6, WIDTH)
    assert use_fused_attention(fused, x) == {"": ""}

    explained = torch._dynamo.explain(fused)(x)

    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def test_a_name_that_appears_later_goes_back_to_the_scripts_own_code():
    class Asking(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            y = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
            return 2 * y if hasattr(self, "doubled") else y

    plain, fused = built(Asking), built(Asking)
    x = torch.randn(2, 6, WIDTH)
    assert use_fused_attention(fused, x) == {"": ""}

    plain.doubled = fused.doubled = torch.ones(1)

    assert torch.equal(fused(x), plain(x))


class Masked(Attention):
    """Hides what a mask of its own says, as a model with local and global layers does."""

    def __init__(self, hidden):
        super().__init__()
        self.register_buffer("hidden", hidden)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(self.hidden, float("-inf"))
        return scores.softmax(dim=-1) @ v


@pytest.mark.parametrize("is_local", [False, True])
def test_layers_alike_are_compiled_once_and_those_with_another_mask_once_more(is_local):
    causal = torch.ones(6, 6).triu(1).bool()
    local = causal | torch.ones(6, 6).tril(-3).bool()
    layers = nn.Sequential(*(Masked(local if is_local and n % 2 else causal) for n in range(12)))
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = layers(x)
    assert set(use_fused_attention(layers, x).values()) == {""}
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)

    with torch.no_grad():  # for its guards torch asks for .grad, and warns of it
        torch.testing.assert_close(layers(x), expected)

    assert counter.frame_count == 1 + is_local
