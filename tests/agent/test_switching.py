"""Techniques switched on and off while a training runs, in this process."""

import contextlib
import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar, final

import pytest
import torch
from torch.utils.data import dataloader
from torch.utils.data._utils import fetch as fetching

from flatout.agent.session import Session
from flatout.agent.switching import LATE, FetcherSwitches, OptimizerGroups, SwitchBoard
from flatout.data.proof.forked import in_fork
from flatout.records import catalogue
from flatout.records.errors import NotApplicable
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import (
    Effect,
    Numerics,
    RunningTraining,
    Switch,
    Technique,
    can_switch,
    is_switched_in_fetcher,
)
from flatout.records.trial_spec import TrialSpec
from flatout.techniques.compute.cpu_threads import CpuThreads
from flatout.techniques.compute.scheduled_gc import ScheduledGc
from flatout.techniques.memory.channels_last import ChannelsLast
from flatout.techniques.optimizer.foreach_optimizer import ForeachOptimizer
from flatout.techniques.optimizer.fused_optimizer import FusedOptimizer
from flatout.techniques.precision.bf16_autocast import Bf16Autocast

ON, OFF = True, False


class Fake:
    """Stands for a technique with a switch of its own."""

    def __init__(self, switch):
        self.made = switch

    def switch(self, training):
        del training
        return self.made


class Parts:
    """What a switch board sees of a session."""

    def __init__(self, roots, optimizers=()):
        self.roots, self.optimizers = roots, list(optimizers)
        self.training_calls = {id(root): root.__call__ for root in roots}
        self.errors = []

    def is_mine(self):
        return True

    def quietly(self, act):
        def quiet(*args):
            with contextlib.suppress(Exception):
                act(*args)

        return quiet

    def call(self, *args):
        return self.training_calls[id(self.roots[0])](*args)


@pytest.fixture(autouse=True)
def backward_as_it_was():
    before = torch.autograd.backward
    yield
    torch.autograd.backward = before


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))


def train(model, optimizer, steps, switch=None):
    """Train, the switch turned before each step but the first two."""
    torch.manual_seed(1)
    for number in range(steps):
        if switch is not None and number > 1:
            switch.turn(number % 2 == 0)
        optimizer.zero_grad(set_to_none=number % 3 == 0)
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def make_adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)


def make_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("make", [make_adam, make_sgd])
@pytest.mark.parametrize("technique", [FusedOptimizer(), ForeachOptimizer(), ChannelsLast()])
def test_a_training_that_is_switched_on_and_off_learns_the_same(technique, make):
    plain, switched = network(), network()
    one, other = make(plain), make(switched)
    train(switched, other, 2)
    train(plain, one, 2)

    switch = technique.switch(RunningTraining(roots=[switched], optimizers=[other]))
    wanted, found = train(plain, one, 9), train(switched, other, 9, switch)

    assert torch.allclose(wanted, found, atol=2e-6)


@pytest.mark.parametrize("technique", [FusedOptimizer(), ForeachOptimizer(), ChannelsLast()])
def test_what_was_switched_off_is_as_it_was(technique):
    model = network()
    optimizer = make_adam(model)
    train(model, optimizer, 2)
    before = copy.deepcopy(
        [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    )

    switch = technique.switch(RunningTraining(roots=[model], optimizers=[optimizer]))
    switch.turn(ON)
    switch.turn(OFF)

    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == before
    assert all(p.is_contiguous() for p in model.parameters())
    assert all(
        value.is_contiguous() for state in optimizer.state.values() for value in state.values()
    )


def test_an_optimizer_with_an_obstacle_is_left_alone_and_the_others_are_switched():
    first, second = network(), network()
    plain, own = make_adam(first), torch.optim.Rprop(second.parameters())

    switch = FusedOptimizer().switch(RunningTraining(roots=[first], optimizers=[plain, own]))
    switch.turn(ON)

    assert plain.param_groups[0]["fused"] is True
    assert "fused" not in own.param_groups[0]


def test_no_optimizer_that_can_be_switched_is_a_reason():
    model = network()
    own = torch.optim.Rprop(model.parameters())

    with pytest.raises(NotApplicable, match="no fused implementation"):
        OptimizerGroups([own], lambda _: "it has no fused implementation")


def test_threads_are_put_back():
    before = torch.get_num_threads()
    switch = CpuThreads(threads=before + 1).switch(RunningTraining(roots=[], optimizers=[]))

    switch.turn(ON)
    during = torch.get_num_threads()
    switch.turn(OFF)

    assert (during, torch.get_num_threads()) == (before + 1, before)


def test_collection_is_left_to_python_again():
    import gc

    switch = ScheduledGc().switch(RunningTraining(roots=[], optimizers=[]))
    switch.turn(ON)
    during = gc.isenabled()
    switch.turn(OFF)

    assert not during
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_call_goes_through_the_techniques_that_are_on():
    model = network()
    parts = Parts([model])
    board = SwitchBoard(parts, {"bf16": Bf16Autocast()})
    seen = []
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    board.begin()

    parts.call(torch.randn(1, 3, 8, 8))
    board.turn_to(("bf16",))
    out = parts.call(torch.randn(1, 3, 8, 8))
    board.turn_to(())
    parts.call(torch.randn(1, 3, 8, 8))

    assert seen == [torch.float32, torch.bfloat16, torch.float32]
    assert out.dtype == torch.float32


def failing(*_args, **_kwargs):
    raise RuntimeError("no kernel for it")


def test_a_technique_that_fails_in_a_call_is_off_and_named_and_the_call_is_made_without_it():
    parts = Parts([network()])
    board = SwitchBoard(parts, {"bad": Fake(Switch(call=lambda _call, _root: failing))})
    board.begin()
    board.turn_to(("bad",))

    out = parts.call(torch.randn(1, 3, 8, 8))

    assert out.shape == (1, 4, 4, 4)
    assert board.on == ()
    assert board.failed == {"bad": "RuntimeError: no kernel for it"}


def test_where_several_are_on_a_failure_turns_all_off_and_blames_none_yet():
    parts = Parts([network()])
    fine = Fake(Switch())
    board = SwitchBoard(
        parts, {"fine": fine, "bad": Fake(Switch(call=lambda _call, _root: failing))}
    )
    board.begin()
    board.turn_to(("fine", "bad"))

    parts.call(torch.randn(1, 3, 8, 8))

    assert board.on == ()
    assert board.failed == {}
    assert board.trouble == "RuntimeError: no kernel for it"


def test_a_failure_of_the_script_itself_stays_its_own():
    parts = Parts([network()])
    board = SwitchBoard(parts, {})
    board.begin()

    with pytest.raises(RuntimeError):
        parts.call(torch.randn(1, 5, 8, 8))


def test_a_technique_that_fails_in_backward_is_off_and_the_training_goes_on():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no backward")

    parts = Parts([network()])
    board = SwitchBoard(
        parts,
        {"bad": Fake(Switch(call=lambda call, _root: lambda *a: Bad.apply(call(*a))))},
    )
    board.begin()
    board.turn_to(("bad",))

    parts.call(torch.randn(1, 3, 8, 8)).sum().backward()

    assert board.failed == {"bad": "RuntimeError: no backward"}
    assert board.on == ()


def test_a_technique_that_cannot_be_switched_here_is_refused_with_its_reason():
    def refusing(is_on):
        del is_on
        raise NotApplicable("nothing to do")

    parts = Parts([network()])
    board = SwitchBoard(parts, {"one": Fake(Switch(turn=refusing)), "two": Fake(Switch())})
    board.begin()

    board.turn_to(("one", "two"))

    assert board.refused == {"one": "nothing to do"}
    assert board.on == ("two",)


def test_techniques_are_applied_in_the_order_of_the_recipe():
    order = []

    def adding(name):
        def wrap(call, root):
            del root

            def run(*args):
                order.append(name)
                return call(*args)

            return run

        return Fake(Switch(call=wrap))

    parts = Parts([network()])
    board = SwitchBoard(parts, {"inner": adding("inner"), "outer": adding("outer")})
    board.begin()
    board.turn_to(("outer", "inner"))

    parts.call(torch.randn(1, 3, 8, 8))

    assert order == ["outer", "inner"]


SWITCHED = {
    is_of_data: [
        name
        for name in catalogue.names()
        if can_switch(kind := catalogue.technique_class(name))
        and is_switched_in_fetcher(kind) is is_of_data
    ]
    for is_of_data in (False, True)
}


@pytest.mark.parametrize("name", SWITCHED[False])
def test_a_technique_that_can_be_switched_leaves_the_training_off_at_first(name):
    (technique,) = catalogue.build(Recipe(choices=(Choice(technique=name),)))
    model = network()
    optimizer = make_adam(model)
    train(model, optimizer, 1)
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()

    with contextlib.suppress(NotApplicable):
        technique.switch(RunningTraining(roots=[model], optimizers=[optimizer]))

    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before
    assert optimizer.param_groups[0]["fused"] is False
    assert all(p.is_contiguous() for p in model.parameters())
    assert model._compiled_call_impl is None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Negated(Technique):
    """Gives each sample with the other sign."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    keeps_samples: ClassVar[bool] = True

    @classmethod
    def candidates(cls, profile, machine):
        return ()

    def predict(self, profile, machine):
        return Effect()

    def turn_in_fetcher(self, fetcher, is_on):
        numbers = [*range(64)]
        fetcher.dataset = [-number for number in numbers] if is_on else numbers


@pytest.fixture
def fetchers():
    """Yield a session and the switches of a technique on its data, which acts already."""
    session = Session(TrialSpec())
    found = FetcherSwitches(session, {"negated": Negated(), "cpu_threads": CpuThreads()})
    (technique,) = found.techniques.values()
    assert session.techniques == (technique,)
    session.note_status(technique, "applied")
    before = fetching._MapDatasetFetcher.fetch, dataloader.DataLoader._get_iterator
    found.install()
    yield session, found
    fetching._MapDatasetFetcher.fetch, dataloader.DataLoader._get_iterator = before


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_made_the_other_way_once_those_made_ahead_are_used(fetchers, workers):
    _, found = fetchers
    turn = found.switch("negated").turn
    loader = dataloader.DataLoader([*range(64)], batch_size=2, num_workers=workers)
    batches = iter(loader)

    before = [next(batches) for _ in range(3)]
    turn(ON)
    late = [next(batches) for _ in range(found.in_flight)]
    during = [next(batches) for _ in range(3)]
    turn(OFF)
    late += [next(batches) for _ in range(found.in_flight)]
    after = [next(batches) for _ in range(3)]

    assert found.in_flight == (2 * 2 + LATE if workers else 0)
    drawn = torch.cat([*before, *late, *during, *after]).abs()
    assert drawn.unique().numel() == drawn.numel()
    assert (torch.cat(during) < 0).all()
    assert (torch.cat([*before, *after]) >= 0).all()


def test_a_copy_of_the_process_sees_the_samples_that_nothing_keeps(fetchers):
    _, found = fetchers
    found.switch("negated").turn(ON)

    def draw():
        kind = fetching._MapDatasetFetcher
        return kind([0] * 64, auto_collation=True, collate_fn=list, drop_last=False).fetch([3, 4])

    assert draw() == [-3, -4]
    assert in_fork(draw, 20.0) == [3, 4]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (("not_applicable", "no file is read"), (NotApplicable, "no file is read")),
        (("failed", "OSError: no"), (RuntimeError, "OSError: no")),
        (None, (NotApplicable, "no training loader")),
    ],
)
def test_what_did_not_act_at_its_hook_points_cannot_be_switched(fetchers, status, expected):
    session, found = fetchers
    session.status.clear()
    if status:
        session.note_status(found.techniques["negated"], *status)

    with pytest.raises(expected[0], match=expected[1]):
        found.switch("negated")


def test_workers_that_are_not_forked_see_no_switch(fetchers):
    session, found = fetchers
    asked = {"start_method": "spawn"}
    session.loaders["train.py:main#0"] = SimpleNamespace(asked=asked, is_training=True)

    with pytest.raises(NotApplicable, match="forked"):
        found.switch("negated")


def test_only_a_switch_of_the_data_is_seen_late(fetchers):
    session, found = fetchers
    found.in_flight = 6
    parts = Parts([network()])
    parts.status, parts.loaders = session.status, {}
    board = SwitchBoard(parts, {"negated": Fake(None), "other": Fake(Switch())}, found)
    board.begin()

    board.turn_to(("other",))
    others = board.steps_until_seen(())
    board.turn_to(("other", "negated"))

    assert (others, board.steps_until_seen(("other",))) == (0, 6)
