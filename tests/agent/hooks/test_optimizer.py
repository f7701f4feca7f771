"""Where a step ends: optimizers inside backward, and those that come while steps are skipped."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from flatout.agent import patching
from flatout.agent.hooks import optimizer as optimizer_hook
from flatout.agent.hooks.optimizer import _Steps
from flatout.agent.hooks.step import _Backward
from flatout.agent.session import Session
from flatout.records.phase_clock import BACKWARD, OPTIMIZER
from flatout.records.trial_spec import TrialSpec


def built(session, count=1):
    """Return optimizers as a script builds them, one for each parameter."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
    for optimizer in optimizers:
        session.add_optimizer(optimizer)
    return optimizers


def here(run):
    run()


def in_another_thread(run):
    """Stand for autograd's thread of a device, which backward waits for."""
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("place", [here, in_another_thread])
def test_optimizers_that_step_inside_backward_end_one_step_with_it(place):
    session = Session(TrialSpec())
    steps, backward, optimizers = _Steps(session), _Backward(session), built(session, 3)

    def hooks():
        for optimizer in optimizers:
            steps.before(optimizer, (optimizer,), {})
            steps.after(optimizer, (optimizer,), {})

    for _ in range(4):
        session.clock.push(BACKWARD)
        place(hooks)
        session.clock.pop()
        backward.ended()

    assert session.counts == {-1: 4}
    assert session.knows_optimizers
    assert len(session.optimizer_facts) == 3
    assert all(segment.seconds[BACKWARD] > 0 for segment in session.segments)
    assert session.errors == []


def test_a_backward_in_which_nothing_stepped_ends_no_step_where_there_is_an_optimizer():
    session = Session(TrialSpec())
    backward, (optimizer,) = _Backward(session), built(session)

    backward.ended()

    assert optimizer
    assert session.counts == {}


def test_a_closure_that_goes_backward_inside_a_step_leaves_its_end_where_it_is():
    session = Session(TrialSpec())
    steps, (optimizer,) = _Steps(session), built(session)

    steps.before(optimizer, (optimizer,), {})
    session.clock.push(BACKWARD)
    session.clock.pop()
    _Backward(session).ended()
    steps.after(optimizer, (optimizer,), {})

    assert session.counts == {0: 1}
    assert OPTIMIZER not in session.clock.stack


def test_an_optimizer_that_comes_while_steps_are_skipped_is_followed():
    session = Session(TrialSpec(skips_below_s=1.0))
    steps, optimizers = _Steps(session), built(session, 2)
    steps.before(optimizers[0], (optimizers[0],), {})
    steps.after(optimizers[0], (optimizers[0],), {})
    session.sampler.skips_left = 9

    steps.after(optimizers[1], (optimizers[1],), {})  # the next fold's; its begin is not heard

    assert session.counts == {0: 1, 1: 1}
    assert session.sampler.skips_left == 0
    assert session.segment.is_sampled
    assert len(session.optimizer_facts) == 2


def test_an_optimizer_like_one_that_is_gone_is_described_once():
    session = Session(TrialSpec())
    steps = _Steps(session)
    for _ in range(5):
        (optimizer,) = built(session)
        steps.before(optimizer, (optimizer,), {})
        steps.after(optimizer, (optimizer,), {})
        del optimizer
        gc.collect()

    assert len(session.counts) == 5
    assert len(session.optimizer_facts) == 1


@pytest.fixture
def installed(request):
    """A session that listens to optimizers and backward, until the test is over."""
    before = set(patching.patches())
    session = Session(TrialSpec(mode=getattr(request, "param", "measure")))
    optimizer_hook.install(session)
    _Backward(session).install()
    yield session
    for patch in set(patching.patches()) - before:
        patch.undo()
    torch_optimizer._global_optimizer_pre_hooks.popitem()
    torch_optimizer._global_optimizer_post_hooks.popitem()


def restored(optimizer):
    """Return an optimizer from a file that holds it as a whole."""
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("again", [copy.deepcopy, restored])
def test_an_optimizer_that_is_copied_or_restored_ends_its_steps_as_one_that_is_built(
    installed, again
):
    optimizer = again(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]))
    (parameter,) = optimizer.param_groups[0]["params"]

    for _ in range(3):
        parameter.square().sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())

    assert installed.counts == {1: 3}
    assert optimizer in installed.optimizers
    assert installed.errors == []


def test_an_optimizer_that_was_built_before_flatout_came_ends_its_steps(request):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    session = request.getfixturevalue("installed")

    for _ in range(3):
        parameter.square().sum().backward()
        optimizer.step()

    assert session.counts == {0: 3}
    assert len(session.segments) == 3


@pytest.mark.parametrize("installed", ["measure", "run"], indirect=True)
def test_a_step_for_each_group_of_parameters_is_one(installed):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(3)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    groups, ended = optimizer.param_groups, []
    installed.on("segment", ended.append)

    for _ in range(4):
        sum(group["params"][0].sum() for group in groups).backward()
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups

    assert installed.counts == {0: 4}
    assert [segment.backwards for segment in ended] == [1] * 4


def test_steps_whose_backward_nobody_hears_any_more_are_whole_ones(installed):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()

    for _ in range(4):
        optimizer.step()  # as where a graph is played again that fills the gradients

    assert installed.counts == {0: 4}


class Searching(torch.optim.SGD):
    """Asks its closure for the loss at several rates."""

    def step(self, closure):
        return [closure(rate, backward=False) for rate in (0.1, 0.2)]


def test_a_closure_is_called_with_what_the_optimizer_gives_it(installed):
    optimizer = Searching([torch.nn.Parameter(torch.ones(2))])

    found = optimizer.step(lambda rate, backward=True: (rate, backward))

    assert found == [(0.1, False), (0.2, False)]
    assert installed.segments[0].closures == 2


class OfModel(torch.optim.SGD):
    """Is given the model in each step, to look at more than its gradients."""

    def step(self, model):
        return model(torch.ones(1, 2)), [*model.parameters()]


def test_a_model_that_an_optimizer_is_given_is_no_closure(installed):
    model = torch.nn.Linear(2, 2)
    optimizer = OfModel(model.parameters())

    _, parameters = optimizer.step(model)

    assert parameters == [*model.parameters()]
    assert installed.segments[0].closures == 0
