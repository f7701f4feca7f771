"""Batches that are drawn in `torch.inference_mode`, which forked workers inherit."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.plain_pictures import plain_loader


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_were_started_in_inference_mode_send_all_their_batches(workers):
    loader = plain_loader(workers=workers, timeout=60)

    with torch.inference_mode():
        found = list(loader)

    assert_shown(found, loader)


def test_workers_that_live_on_after_inference_mode_train_as_well():
    loader = plain_loader(workers=2, timeout=60, persistent_workers=True)
    weight = torch.ones(1, requires_grad=True)

    with torch.inference_mode():
        assert_shown(list(loader), loader)
    for epoch in range(2):
        found = list(loader)
        sum((weight * batch).sum() for batch, _ in found).backward()
        assert_shown(found, loader)
        assert weight.grad is not None, epoch


def assert_shown(found, loader):
    """Make sure that these are the loader's batches, and that they came as bytes."""
    wanted = list(DataLoader(loader.dataset, 2))
    assert loader.collate_fn.trouble == ""
    assert len(found) == len(wanted) == 12
    for (values, numbers), (plain, ours) in zip(found, wanted, strict=True):
        assert torch.equal(values, plain)
        assert torch.equal(numbers, ours)
