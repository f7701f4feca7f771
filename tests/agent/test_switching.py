"""Techniques switched on and off while a training runs, in this process."""

import contextlib
import copy

import pytest
import torch

from flatout.agent.switching import OptimizerGroups, SwitchBoard
from flatout.records import catalogue
from flatout.records.errors import NotApplicable
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import RunningTraining, Switch, can_switch
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


@pytest.mark.parametrize(
    "name", [n for n in catalogue.names() if can_switch(catalogue.technique_class(n))]
)
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
