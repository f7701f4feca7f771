"""Gradients added up over the parts of a batch: the step is that of the whole."""

import pytest
import torch
from torch import nn

import flatout
from flatout.agent.task_loop import train
from flatout.records.errors import UserError
from tests.techniques.peaks import peak_bytes

IGNORED = -100


def batches():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 7, 5, generator=generator)
    y = torch.randint(4, (3, 7), generator=generator)
    y[:, :3] = IGNORED  # the first samples are padding
    return list(zip(x, y, strict=True))


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, ignore_index=IGNORED)


def tokens(batch):
    return (batch[1] != IGNORED).sum()


def task(**changes):
    fields = {
        "model": lambda: nn.Linear(5, 4),
        "data": batches,
        "loss": loss,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        "batch_size": 7,
        "device": "cpu",
        "weight": tokens,
    }
    return flatout.Task(**fields | changes)


def test_parts_of_unequal_size_and_padding_train_as_the_whole_batch():
    whole = train(task())

    parts = train(task(accum_steps=2))

    torch.testing.assert_close(parts.weight, whole.weight, rtol=1e-5, atol=1e-6)


def test_without_its_weight_a_mean_over_tokens_would_train_something_else():
    whole = train(task())

    parts = train(task(accum_steps=2, weight=None))

    assert torch.dist(parts.weight, whole.weight) > 1e-3


def test_less_memory_is_held_at_the_peak():
    def wide(count):
        def big(model, batch):
            return model(batch).square().mean()

        return task(
            model=lambda: nn.Sequential(nn.Linear(8, 256), nn.Sigmoid(), nn.Sigmoid()),
            data=lambda: [torch.randn(2048, 8)],
            loss=big,
            accum_steps=count,
            weight=None,
        )

    train(wide(1))
    assert peak_bytes(lambda: train(wide(8))) < peak_bytes(lambda: train(wide(1))) / 3


def test_a_batch_without_samples_is_refused():
    with pytest.raises(UserError, match="accum_steps=2 splits batches along their samples"):
        train(task(data=lambda: ["text"], accum_steps=2, loss=lambda model, batch: 0))


@pytest.mark.parametrize("count", [0, 1.5])
def test_accum_steps_is_a_count(count):
    with pytest.raises(UserError, match="accum_steps"):
        task(accum_steps=count)
