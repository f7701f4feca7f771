import random

import numpy as np
import torch
from torch import nn

from flatout.agent.untouched import buffers_kept, state_kept, stream_states, streams_kept


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(0))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.count = self.count + 1
        self.cache = torch.cat([self.cache, x.detach().flatten()])
        return self.norm(x)


def test_buffers_are_put_back_those_too_that_a_call_replaces():
    module = Counting()
    before = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}

    with buffers_kept(module):
        module(torch.randn(4, 3)).sum().backward()

    assert {name: buffer for name, (buffer, _) in before.items()} == dict(module.named_buffers())
    assert all(torch.equal(buffer, value) for buffer, value in before.values())


def test_a_buffer_that_a_call_resizes_in_place_is_left_alone():
    module = Counting()

    with buffers_kept(module):
        module.cache.resize_(2)

    assert module.cache.shape == (2,)


def test_backward_goes_on_after_buffers_were_put_back():
    module = Counting()

    with buffers_kept(module):
        loss = module(torch.randn(4, 3)).sum()

    loss.backward()


def test_streams_go_on_as_if_nothing_had_been_drawn():
    np.random.rand()  # numpy loads its streams when they are first asked for

    with streams_kept():
        expected = torch.rand(1).item(), random.random(), np.random.rand()

    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_the_states_of_streams_change_where_something_is_drawn():
    before = stream_states()
    random.random()

    assert [k for k, v in stream_states().items() if str(v) != str(before[k])] == ["random"]


class Noting(nn.Module):
    """Keeps numbers, lists and tensors, and makes a table when it is first called."""

    def __init__(self):
        super().__init__()
        self.calls, self.sizes, self.latest, self.act = 0, [1], None, torch.tanh

    def forward(self, x):
        self.calls += 1
        self.sizes.append(len(x))
        self.latest = x.sum()
        self.table = [0]
        return self.act(x)


def test_what_a_module_keeps_is_put_back_but_for_functions():
    outer = nn.Sequential(Noting(), nn.Tanh())
    module, sizes = outer[0], outer[0].sizes

    with state_kept(outer):
        outer(torch.ones(2))
        module.act = module.forward_of_a_technique = torch.relu

    assert (module.calls, module.sizes, module.latest) == (0, [1], None)
    assert module.sizes is sizes
    assert not hasattr(module, "table")
    assert module.act is module.forward_of_a_technique is torch.relu
