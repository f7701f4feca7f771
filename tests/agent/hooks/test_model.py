"""Which models are roots, what evaluates in their place, and that their facts are what ran."""

import copy
import functools
import gc
import shutil
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm
from torch.optim.swa_utils import AveragedModel

from flatout.agent import patching
from flatout.agent.hooks.model import Roots, kin_of
from flatout.agent.hooks.optimizer import _Steps
from flatout.agent.hooks.step import _Backward
from flatout.agent.samples import is_rehearsed, leading_size
from flatout.agent.session import Session
from flatout.records.phase_clock import EVAL, FORWARD
from flatout.records.profile import ModelFacts
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Workload
from flatout.records.trial_spec import TrialSpec
from flatout.techniques.compile.regional_compile import RegionalCompile
from flatout.techniques.compile.torch_compile import TorchCompile
from flatout.techniques.compute.sdpa_attention import SdpaAttention
from flatout.techniques.memory.microbatching import Microbatching
from flatout.techniques.precision.bf16_autocast import Bf16Autocast
from flatout.techniques.precision.pure_bf16 import PureBf16
from flatout.techniques.precision.tf32 import Tf32
from flatout.workflow.run import run
from tests.paths import ROOT
from tests.techniques.facts import gpu, machine, profile

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(*techniques, calls=1):
    """Return the session of a model that was called in training, and what it gave."""
    session = Session(TrialSpec(mode="measure"), techniques)
    net = nn.Linear(8, 4)
    Roots(session).consider(net, nn.Module.__call__)
    run = session.training_calls[id(net)]
    given = [run(torch.ones(2, 8)) for _ in range(calls)]
    assert session.errors == []
    return session, given


def facts_of(session):
    (plain,) = session.model_facts
    names = ModelFacts.__dataclass_fields__
    return ModelFacts(**{k: v for k, v in plain.items() if k in names} | {"dtypes": ("float32",)})


def test_an_evaluation_with_gradients_is_counted_and_one_without_is_not():
    session = Session(TrialSpec(mode="measure"), ())
    net = nn.Linear(8, 4)
    roots = Roots(session)
    roots.consider(net, nn.Module.__call__)
    net.eval()

    for _ in range(2):
        roots.outermost(net, nn.Module.__call__, (torch.ones(2, 8),), {})
    with torch.no_grad():
        roots.outermost(net, nn.Module.__call__, (torch.ones(2, 8),), {})

    assert facts_of(session).eval_graph_calls == 2


def test_an_evaluation_whose_gradients_are_asked_for_needs_its_graph():
    session = Session(TrialSpec(mode="measure"), ())
    net, x = nn.Linear(8, 4), torch.ones(2, 8, requires_grad=True)
    roots = Roots(session)
    roots.consider(net, nn.Module.__call__)
    net.eval()
    ask = _Backward(session).differentiate(torch.autograd.grad)

    ask(roots.outermost(net, nn.Module.__call__, (x,), {}).sum(), x)  # an attack, or a force
    roots.outermost(net, nn.Module.__call__, (x,), {})

    assert facts_of(session).eval_graph_calls == 1


def test_a_technique_s_autocast_is_a_fact_of_the_model():
    plain, lowered = facts_of(trained()[0]), facts_of(trained(Bf16Autocast(), calls=2)[0])

    assert (plain.used_autocast, lowered.used_autocast) == (False, True)


def test_tf32_is_not_offered_under_bf16_that_a_technique_brought():
    hopper = machine(device=gpu((9, 0)))

    def offered(*techniques):
        return Tf32.candidates(
            profile(kind="cuda", models=(facts_of(trained(*techniques)[0]),)), hopper
        )

    assert offered() == [Tf32()]
    assert offered(Bf16Autocast()) == ()


def test_weights_that_a_technique_converted_have_their_own_dtype():
    session, _ = trained(PureBf16())

    assert session.model_facts[0]["dtypes"] == ["bfloat16"]
    assert session.model_facts[0]["parameter_bytes"] == 2 * (8 * 4 + 4)


def test_the_technique_that_compiled_a_model_is_named(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    session, _ = trained(RegionalCompile(), TorchCompile())

    assert facts_of(session).is_compiled
    assert facts_of(session).compiled_by == "torch_compile"
    assert session.status["regional_compile"][0] == "not_applicable"


def test_a_model_that_no_technique_changes_is_called_without_a_detour():
    session = Session(TrialSpec(mode="measure"))
    net = nn.Linear(8, 4)

    Roots(session).consider(net, nn.Module.__call__)

    assert session.training_calls[id(net)].args == (net,)


def test_what_computes_a_weight_is_no_root(monkeypatch):
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    session = Session(TrialSpec(mode="measure"))
    session.optimizer_count = 1
    Roots(session).install()

    net = nn.Sequential(orthogonal(nn.Linear(8, 8)), spectral_norm(nn.Linear(8, 4)))
    assert net[0].weight.shape == (8, 8)  # computed outside of any model's call
    net(torch.ones(2, 8))

    assert session.roots == [net]


def test_shapes_that_are_not_there_count_no_samples_and_break_nothing():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)])
    symbol = SimpleNamespace(shape=(None, 3), dtype="float32")

    assert (leading_size(nested), leading_size(symbol)) == (0, 0)
    assert leading_size([nested, torch.ones(2)]) == 2
    assert is_rehearsed((([symbol],), {}))
    assert is_rehearsed(((), {"x": symbol}))
    assert not is_rehearsed(((torch.ones(2, 3), nested, None), {}))


@pytest.mark.parametrize("give", [list, tuple, lambda parts: dict(enumerate(parts))])
def test_a_scalar_tells_no_size_where_anything_else_does(give):
    assert leading_size(give([torch.tensor(0.5), torch.ones(20, 2)])) == 20
    assert leading_size(give([torch.tensor(0.5)])) == 1


class Field(nn.Module):
    """A differential equation's right side, called with a time first."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)

    def forward(self, time, state):
        return self.body(state) * time


def test_samples_are_those_of_the_state_where_a_time_comes_first(session):
    net = Field()
    torch.optim.SGD(net.parameters(), 0.1)

    net(torch.tensor(0.5), torch.ones(20, 2))

    assert session.segment.called == 20


class Odd:
    """Settings that a call may be given, with the names of a tensor's attributes."""

    shape = 224

    @property
    def dtype(self):
        return next(iter(()))


@pytest.mark.parametrize("argument", [torch.Tensor, np.float32, Odd(), Odd, SimpleNamespace])
def test_what_only_has_the_names_of_a_tensor_is_looked_at_without_harm(argument):
    assert not is_rehearsed(((argument,), {"kind": argument}))
    assert leading_size(argument) == 0


def test_a_table_with_columns_for_keys_is_counted_as_an_object():
    table = SimpleNamespace(keys=lambda: ["a"], values=np.zeros((4, 1)))

    assert leading_size(table) == 4


class Attention(nn.Module):
    """What all the techniques below act on."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        q = self.inner(x)
        return (q @ q.transpose(-2, -1)).softmax(dim=-1) @ q


@pytest.mark.parametrize(
    "techniques", [(), (Bf16Autocast(), Microbatching(chunks=2), SdpaAttention())]
)
def test_the_real_run_keeps_no_model_that_the_script_lets_go(monkeypatch, techniques):
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    session = Session(TrialSpec(mode="run"), techniques)
    session.optimizer_count = 1
    roots = Roots(session)
    roots.install()
    net = Attention().train()
    trained_before = weakref.ref(net)
    net(torch.ones(4, 3, 8)).sum().backward()

    assert session.roots == [net]
    del net
    gc.collect()
    second = Attention().train()
    second(torch.ones(4, 3, 8))

    assert trained_before() is None
    assert session.roots == [second]
    assert set(session.training_calls) == {id(second)}
    assert session.root_count == 2
    assert session.errors == []


def test_what_is_measured_is_kept_to_the_end():
    session = Session(TrialSpec(mode="measure"))
    net = nn.Linear(8, 4)
    Roots(session).consider(net, nn.Module.__call__)
    alive = weakref.ref(net)

    del net
    gc.collect()

    assert session.roots == [alive()]
    assert alive() is not None


def test_a_later_model_is_noted_as_unseen_though_the_first_is_gone():
    session = Session(TrialSpec(mode="run"))
    net = nn.Linear(8, 4)
    Roots(session).consider(net, nn.Module.__call__)
    session.knows_roots = True

    del net
    gc.collect()
    _Steps(session).check_roots(torch.optim.SGD(nn.Linear(8, 4).parameters(), lr=0.1))

    assert session.trains_unseen


def test_a_real_run_over_folds_holds_no_model_at_its_end(tmp_path):
    script = ROOT / "tests/scripts/plain/models_in_turn.py"
    shutil.copy(script, tmp_path)
    workload = Workload(target=script.name, folder=tmp_path, python=sys.executable)
    techniques = ("bf16_autocast", "microbatching", "fused_optimizer")

    code = run(workload, Recipe(choices=tuple(Choice(technique=name) for name in techniques)))

    assert code == 0


class Net(nn.Module):
    """A model of two parts, of which one is large."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


class Wrapper(nn.Module):
    """What DDP is to a model."""

    def __init__(self):
        super().__init__()
        self.module = Net()

    def forward(self, x):
        return self.module(x)


@pytest.fixture
def session(request):
    """A session that looks for roots, whose patches are gone afterwards."""
    before = set(patching.patches())
    session = Session(TrialSpec(mode=getattr(request, "param", "measure")))
    session.optimizer_count = 1  # one that is gone: what is called trains
    Roots(session).install()
    yield session
    for patch in set(patching.patches()) - before:
        patch.undo()


def trained_until_known(session):
    """Return a model whose roots are known: only their classes and their kin are listened to."""
    net = Wrapper()
    for _ in range(4):
        step(session, net)
    assert session.knows_roots
    return net


def step(session, net):
    """Make a training step and return its segment."""
    segment = session.segment
    net(torch.ones(2, 8)).sum().backward()
    session.end_segment(0)
    return segment


IN_ITS_PLACE = {
    "the model inside a wrapper": lambda net: net.module,
    "a copy": copy.deepcopy,
    "averaged weights": AveragedModel,
    "averaged weights of the model inside": lambda net: AveragedModel(net.module),
    "a large part": lambda net: net.module.encoder,
    "a large part of a copy": lambda net: copy.deepcopy(net).module.encoder,
}


@pytest.mark.parametrize("skips", [0, 5])
@pytest.mark.parametrize("name", IN_ITS_PLACE)
def test_an_evaluation_with_what_is_no_root_itself_is_one(session, name, skips):
    evaluated = IN_ITS_PLACE[name](trained_until_known(session)).eval()
    session.sampler.skips_left = skips
    segment = session.segment

    with torch.inference_mode():
        evaluated(torch.ones(2, 8))
    session.end_segment(0)

    assert segment.evals == 1
    assert segment.seconds[EVAL] > 0


def test_training_calls_and_frozen_parts_are_no_evaluation_in_skipped_steps_either(session):
    net = trained_until_known(session)
    net.module.encoder.eval()
    session.sampler.skips_left = 5

    segment = step(session, net)

    assert segment.evals == 0
    assert segment.seconds[EVAL] == segment.seconds[FORWARD] == 0.0  # nothing was listened to


def test_an_evaluation_before_the_roots_are_known_is_one_as_well(session):
    net = Wrapper()
    step(session, net)
    averaged = AveragedModel(net).eval()

    with torch.no_grad():
        averaged(torch.ones(2, 8))

    assert session.segment.evals == 1


def test_a_call_before_there_is_an_optimizer_makes_no_root(session):
    session.optimizer_count = 0
    net = Net()
    net(torch.ones(2, 8))
    net.encoder(torch.ones(2, 8))  # how many features has it?

    assert session.roots == session.model_facts == []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.add_optimizer(optimizer)
    assert step(session, net).calls == [1]
    assert session.roots == [net]


def test_a_model_that_trains_without_an_optimizer_is_a_root_from_the_second_step_on(session):
    session.optimizer_count = 0
    net = Net()

    assert [step(session, net).calls for _ in range(3)] == [[], [1], [1]]


def test_autocast_is_seen_though_the_first_call_is_outside(session):
    net = Net()
    net(torch.ones(2, 8))

    with torch.autocast("cpu", torch.bfloat16):
        net(torch.ones(2, 8))

    assert session.model_facts[0]["used_autocast"]


class Scaled(Net):
    """A model whose own `__call__` gives another input to torch's."""

    def __call__(self, batch):
        return super().__call__(batch["x"] / 2)


@pytest.mark.parametrize("skips", [0, 5])
@pytest.mark.parametrize("session", ["measure", "run"], indirect=True)
def test_a_call_of_the_script_s_own_goes_on_to_be_made(session, skips):
    net, given = Scaled(), {"x": torch.ones(2, 8)}
    wanted = Net.__call__(net, torch.ones(2, 8) / 2)
    for _ in range(4):
        net(given).sum().backward()
        session.end_segment(0)
    assert session.knows_roots
    session.sampler.skips_left = skips

    segment = session.segment
    assert net(given).equal(wanted)
    assert segment.calls == [1]
    with torch.no_grad():
        assert net.eval()(given).equal(wanted)

    assert segment.evals == 1
    assert session.roots == [net]
    assert session.errors == []


def test_what_the_script_puts_in_the_place_of_every_call_is_called(session, monkeypatch):
    called, before = [], nn.Module.__call__

    @functools.wraps(before)
    def call(module, *args, **kwargs):
        called.append(type(module))
        return before(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)
    net = Net()
    segments = [step(session, net) for _ in range(6)]

    assert session.knows_roots
    assert called.count(Net) == 6
    assert [segment.calls for segment in segments] == [[1]] * 6


def test_models_are_listened_to_until_the_end(session):
    net = trained_until_known(session)
    call = Net.__call__

    session.fire("stop")

    assert call is not Net.__call__
    step(session, net)
    assert session.segments[-1].calls == []


class Named(Net):
    """A model with names in its signature that wrappers around a call have as well."""

    def forward(self, x, *, module, root, original):
        return super().forward(x)


@pytest.mark.parametrize("session", ["measure", "run"], indirect=True)
def test_a_call_may_use_any_names(session):
    net = Named()
    for _ in range(5):
        net(torch.ones(2, 8), module=1, root=2, original=3).sum().backward()
        session.end_segment(0)

    assert session.roots == [net]
    assert session.errors == []


class Grouped(Net):
    """A model with a method of its own under one of torch's names, as for rates by layer."""

    def parameters(self):
        return [{"params": list(super().parameters()), "lr": 0.1}]


class Keyed:
    """Something to call a model with, whose values have to be asked for in a way of their own."""

    def keys(self):
        return ["a"]

    def values(self, kind):
        return [kind]


def test_what_flatout_cannot_look_at_ends_no_training(session):
    odd, plain = Grouped(), Net()
    plain.forward = lambda _: odd(torch.ones(2, 8))

    odd(torch.ones(2, 8))
    plain(Keyed())

    assert session.roots == [plain]
    assert len(session.errors) == 2


def test_a_frozen_model_of_another_kind_is_no_evaluation(session):
    net, features = Wrapper(), nn.GRU(8, 8)
    step(session, net)

    with torch.no_grad():
        features(torch.ones(2, 8))

    assert session.segment.evals == 0
    assert session.clock.totals[EVAL] > 0


class Compiled(nn.Module):
    """What the class that `torch.compile` returns is to a model."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model


def test_what_a_compiled_model_calls_inside_is_left_as_it_is():
    assert {*kin_of(Compiled(Wrapper()))} == {Compiled, Wrapper}
    assert {*kin_of(Wrapper())} == {Wrapper, Net, nn.Sequential}


def test_a_model_made_again_takes_the_place_of_the_one_before_and_may_go(session):
    trained_until_known(session)
    second = Wrapper()
    gone = weakref.ref(second)

    first_step, later_step = step(session, second), step(session, second)
    del second
    gc.collect()

    assert first_step.calls == later_step.calls == [1]
    assert first_step.seconds[FORWARD] > 0
    assert len(session.model_facts) == 1
    assert gone() is None


def test_a_second_copy_that_trains_in_the_same_step_has_a_number_of_its_own(session):
    net, other = trained_until_known(session), Wrapper()

    (net(torch.ones(2, 8)) + other(torch.ones(2, 8))).sum().backward()

    assert session.segment.calls == [1, 1]
    assert [facts["name"] for facts in session.model_facts] == ["Wrapper", "Wrapper"]


def test_a_model_that_trains_in_evaluation_mode_is_a_root_from_the_second_step_on(session):
    net = Wrapper().eval()
    for _ in range(2):
        loss = net(torch.ones(2, 8)).sum()
        session.fire("backward", loss)
        loss.backward()

    assert session.roots == [net]
    with torch.no_grad():
        net(torch.ones(2, 8))
    assert session.segment.calls == [1]
    assert session.segment.evals == 1


def test_an_evaluation_with_gradients_between_steps_makes_nothing_a_training_call(session):
    net = Wrapper()
    step(session, net)
    net.eval()
    net(torch.ones(2, 8))
    net.train()

    loss = net(torch.ones(2, 8)).sum()
    session.fire("backward", loss)
    net.eval()
    net(torch.ones(2, 8))

    assert session.segment.calls == [1]
    assert session.segment.evals == 2


def test_a_copy_that_each_task_trains_takes_the_place_of_the_one_before(session):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.add_optimizer(optimizer)
    learners = []
    for _ in range(3):
        learner = copy.deepcopy(model)
        learners.append(weakref.ref(learner))
        inner = torch.optim.SGD(learner.parameters(), lr=0.1)
        session.add_optimizer(inner)
        step(session, learner)
        step(session, model)
    gc.collect()

    assert [segment.calls for segment in session.segments] == [[1], [0, 1]] * 3
    assert len(session.model_facts) == 2
    assert session.roots == [learner, model]
    assert [each() is None for each in learners] == [True, True, False]
