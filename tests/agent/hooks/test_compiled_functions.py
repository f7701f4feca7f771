"""What happens in functions that a script compiles, where neither models nor hooks are called."""

import types

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flatout.agent.hooks.compiled_functions import MOST_LOOKS, CompiledFunctions
from flatout.agent.hooks.model import Roots
from flatout.agent.hooks.optimizer import _Steps
from flatout.agent.session import Session
from flatout.records.phase_clock import EVAL, FORWARD, OPTIMIZER
from flatout.records.trial_spec import TrialSpec
from flatout.techniques.precision.bf16_autocast import Bf16Autocast

pytestmark = pytest.mark.filterwarnings("ignore")
X, Y = torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)
compiled = {"backend": "eager"}
"""Dynamo alone: what is in the function is traced, and no hook in it is called."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x)


@pytest.fixture
def listened(monkeypatch):
    """Return what makes a session with a net and its optimizer, both listened to."""
    handles, sessions = [], []
    monkeypatch.setattr(torch, "compile", torch.compile)
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)

    def make(*techniques):
        session = Session(TrialSpec(mode="measure"), techniques)
        sessions.append(session)
        roots = Roots(session)
        roots.install()
        CompiledFunctions(roots).install()
        session.steps = _Steps(session)
        handles.append(register_optimizer_step_pre_hook(session.steps.before))
        handles.append(register_optimizer_step_post_hook(session.steps.after))
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session.add_optimizer(optimizer)
        return session, net, optimizer

    yield make
    for handle in handles:
        handle.remove()
    for session in sessions:
        session.fire("stop")
    torch._dynamo.reset()


def test_a_compiled_loss_is_a_training_call_of_the_model_in_it(listened):
    session, net, optimizer = listened()

    @torch.compile(**compiled)
    def loss_of(x, y):
        return (net(x).sum(-1) - y).square().mean()

    for _ in range(3):
        loss_of(X, Y).backward()
        assert session.segment.calls == [1]
        assert session.segment.called == len(X)
        assert session.clock.totals[FORWARD] > 0
        optimizer.step()

    assert session.roots == [net]
    assert session.model_facts[0]["is_compiled"]
    assert session.made_steps == 3
    assert session.errors == []


class Holder:
    def __init__(self, net):
        self.parts = {"net": net}

    def loss(self, x):
        return self.parts["net"](x).sum()


def through_a_helper(net):
    def helper(x):
        return net(x).sum()

    return lambda x: helper(x)


@pytest.mark.parametrize(
    "written",
    [
        through_a_helper,
        lambda net: Holder(net).loss,
        lambda net: types.MethodType(lambda self, x: self(x).sum(), net),
    ],
    ids=["through a helper", "a method of what holds the model", "a method of the model"],
)
def test_the_model_is_found_wherever_the_function_has_it_from(listened, written):
    session, net, _ = listened()
    function = torch.compile(written(net), **compiled)

    function(X)

    assert session.roots == [net]
    assert session.segment.calls == [1]


def test_a_function_that_is_given_another_model_trains_that_one(listened, monkeypatch):
    session, net, _ = listened()
    other = Net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    session.add_optimizer(optimizer)
    criterion = nn.CrossEntropyLoss()
    function = torch.compile(lambda model, loss, x, y: loss(model(x), y), **compiled)
    judged, judge = [], CompiledFunctions.judge
    monkeypatch.setattr(
        CompiledFunctions, "judge", lambda *given: judged.append(given) or judge(*given)
    )

    for model in (net, net, net, other, other):
        function(model, criterion, X, Y)

    assert session.errors == []
    assert session.roots == [net, other]
    assert session.segment.calls == [3, 2]
    assert len(judged) == 2


def test_techniques_act_on_the_function(listened):
    session, net, _ = listened(Bf16Autocast())
    function = torch.compile(lambda x: (net(x), torch.is_autocast_enabled("cpu")), **compiled)

    assert [function(X)[1] for _ in range(2)] == [True, True]
    assert session.status == {"bf16_autocast": ("applied", "")}


def test_a_call_of_it_without_gradients_is_an_evaluation(listened):
    session, net, _ = listened()
    function = torch.compile(lambda x: net(x).sum(), **compiled)
    function(X)
    before = session.clock.totals[EVAL]

    with torch.no_grad():
        function(X)

    assert session.clock.totals[EVAL] > before
    assert session.segment.evals == 1
    assert session.segment.calls == [1]


def test_what_is_compiled_to_change_gradients_or_copies_trains_nothing(listened):
    session, net, _ = listened()

    @torch.compile(**compiled)
    def follow(copy):
        with torch.no_grad():
            for mine, theirs in zip(copy.parameters(), net.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    copy = Net()
    for _ in range(3):
        follow(copy)

    assert sum(session.segment.calls) <= 1  # the first call shows what it does
    assert session.counts == {}


def test_a_compiled_step_of_the_optimizer_ends_a_step(listened):
    session, net, optimizer = listened()

    @torch.compile(fullgraph=False, **compiled)
    def step():
        optimizer.step()

    for _ in range(4):
        optimizer.zero_grad()
        net(X).sum().backward()
        session.segment.backwards += 1  # backward is not listened to here
        step()

    assert session.made_steps == 4
    assert [one.who for one in session.segments] == [0] * 4
    assert all(one.seconds[OPTIMIZER] > 0 for one in session.segments[1:])


def test_a_step_that_is_compiled_as_a_whole_is_one(listened):
    session, net, optimizer = listened()

    @torch.compile(**compiled)
    def train_step(x, y):
        optimizer.zero_grad()
        loss = (net(x).sum(-1) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(4):
        train_step(X, Y)

    assert session.made_steps == 4
    assert session.roots == [net]
    assert all(one.calls == [1] and one.backwards == 1 for one in session.segments)


def test_a_step_whose_hooks_are_called_counts_once(listened):
    session, net, optimizer = listened()

    @torch.compile(**compiled)
    def train_step(x):
        net(x).sum().backward()
        torch._dynamo.graph_break()
        torch.compiler.disable(optimizer.step)()

    for _ in range(3):
        train_step(X)

    assert session.made_steps == 3


def test_functions_without_a_model_are_left_alone_and_soon_not_looked_into(listened, monkeypatch):
    session, *trained = listened()
    looked = []
    parts_of = CompiledFunctions.parts_of
    monkeypatch.setattr(
        CompiledFunctions, "parts_of", lambda *given: looked.append(given) or parts_of(*given)
    )
    double = torch.compile(lambda x: 2 * x, **compiled)

    for _ in range(2 * MOST_LOOKS):
        assert double(X).sum() == 64

    assert session.errors == []
    asked = [given for given in looked if given[2] == 2]
    assert len(asked) == MOST_LOOKS + 1
    assert len(trained) == 2  # kept alive: without an optimizer nothing is looked into at all
    assert (session.roots, session.segment.calls) == ([], [])


def test_models_are_compiled_as_ever(listened):
    _, net, _ = listened()

    whole = torch.compile(net, **compiled)
    inner = torch.compile(torch.compile(lambda x: net(x).sum(), **compiled), **compiled)

    assert isinstance(whole, torch._dynamo.OptimizedModule)
    assert inner(X).requires_grad
