"""What a checkpoint holds beside torch's parts is there for the technique that wrote it."""

import torch
from torch import nn

from flatout.agent.hooks import optimizer as loaded_parts


def stepper():
    return torch.optim.AdamW(nn.Linear(2, 2).parameters())


def test_parts_that_torch_does_not_know_are_found_until_they_are_forgotten():
    optimizer, other = stepper(), stepper()
    loaded_parts.keep(optimizer)

    optimizer.load_state_dict({**other.state_dict(), "mine": {"a": 1}})

    assert loaded_parts.find(optimizer, "mine") == {"a": 1}
    assert loaded_parts.find(optimizer, "state") is None
    assert loaded_parts.find(other, "mine") is None
    loaded_parts.forget(optimizer)
    assert loaded_parts.find(optimizer, "mine") is None


def test_the_last_checkpoint_counts():
    optimizer = stepper()
    loaded_parts.keep(optimizer)
    optimizer.load_state_dict({**optimizer.state_dict(), "mine": 1})

    optimizer.load_state_dict(optimizer.state_dict())

    assert loaded_parts.find(optimizer, "mine") is None


def test_what_is_loaded_after_they_were_forgotten_is_not_kept():
    optimizer = stepper()
    loaded_parts.keep(optimizer)
    loaded_parts.forget(optimizer)

    optimizer.load_state_dict({**optimizer.state_dict(), "mine": 1})

    assert loaded_parts.find(optimizer, "mine") is None
    loaded_parts.forget(optimizer)
