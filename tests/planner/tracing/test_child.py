import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatout.planner.tracing.script import explained


def test_reentrant_checkpoints_that_are_fed_with_data_are_named_as_the_cause():
    layer = nn.Linear(4, 4)

    with (
        pytest.warns(UserWarning, match="None of the inputs"),
        pytest.raises(RuntimeError) as failure,
    ):
        checkpoint(layer, torch.randn(2, 4), use_reentrant=True).sum().backward()

    assert "use_reentrant=False" in explained(failure.value)


def test_data_parallel_on_several_devices_is_named_with_what_can_be_planned():
    error = AttributeError("module 'torch._C' has no attribute '_broadcast_coalesced'")

    assert "leave device_ids out" in explained(error)


def test_any_other_error_is_repeated():
    assert explained(ValueError("no")).endswith("ValueError: no; nothing could be predicted")
