"""What a training's attention runs on is noted of its own calls alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from flatout.agent.measuring import attention
from flatout.agent.measuring.attention import AttentionMeter
from flatout.agent.session import Session
from flatout.records.trial_spec import TrialSpec
from flatout.techniques.compile.torch_compile.compile_watch import CompileWatch
from flatout.techniques.compute.sdpa_attention import use_fused_attention


class ByHand(nn.Module):
    """Writes attention out."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8)

    def forward(self, x):
        q = self.query(x)
        weights = functional.softmax(q @ x.transpose(-2, -1), dim=-1)
        return weights @ x


class Fused(nn.Module):
    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x)


def backend_by_dtype(asked):
    """Return a stand-in for a GPU's choice, which notes for which dtypes it was asked."""

    def backend_of(query, *_, **__):
        asked.append(query.dtype)
        return ("math", "no") if query.dtype == torch.float64 else ("flash", "")

    return backend_of


@pytest.fixture
def session():
    found = Session(TrialSpec())
    found.model_facts.append({})
    AttentionMeter(found).install()
    return found


def x(**changes):
    return torch.randn(2, 3, 4, 8, **changes)


def test_the_proof_of_a_rewritten_forward_is_not_taken_for_the_training(monkeypatch, session):
    asked = []
    monkeypatch.setattr(attention, "backend_of", backend_by_dtype(asked))
    net, given = ByHand(), x()

    session.fire("root", net)
    assert set(use_fused_attention(net, given).values()) == {""}
    net(given)
    session.fire("forward_end", net, None)

    assert asked == [torch.float32]
    assert session.model_facts == [{"attention_backend": "flash", "attention_why": ""}]
    assert session.errors == []


def test_a_compiled_model_is_compiled_once_whoever_compiled_it(session):
    torch._dynamo.reset()
    net, operation = Fused(), functional.scaled_dot_product_attention
    net.compile(backend="eager")
    watch = CompileWatch().begin()

    session.fire("root", net)
    for _ in range(3):
        session.fire("forward_end", net, net(x()))

    assert watch.report() == "1 regions compiled, 0 of them again"
    assert functional.scaled_dot_product_attention is operation
    assert session.model_facts == [{}]
