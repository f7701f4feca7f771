"""The loop, with real training: it does what the same lines in a script would do."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import flatout
from flatout.agent.task_loop import moved, train, training_steps
from flatout.records.errors import UserError

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "x y")


def samples():
    x = torch.linspace(-1, 1, 20)[:, None]
    return TensorDataset(x, 3 * x + 0.5)


def squared_error(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def line(**changes):
    """Return the task of fitting a line."""
    fields = {
        "model": lambda: nn.Linear(1, 1),
        "data": samples,
        "loss": squared_error,
        "optimizer": sgd,
        "batch_size": 5,
        "epochs": 30,
        "device": "cpu",
    }
    return flatout.Task(**{**fields, **changes})


def test_training_finds_the_line():
    model = train(line())

    assert model.weight.item() == pytest.approx(3, abs=0.05)
    assert model.bias.item() == pytest.approx(0.5, abs=0.05)


def test_it_is_bit_for_bit_the_loop_one_would_write():
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    loader = DataLoader(samples(), batch_size=5, shuffle=True)
    optimizer = sgd(model)
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            squared_error(model, batch).backward()
            optimizer.step()

    trained = train(line(epochs=3))

    assert torch.equal(trained.weight, model.weight)
    assert torch.equal(trained.bias, model.bias)


def test_steps_are_handed_out_with_their_epoch_and_loss():
    steps = list(training_steps(line(epochs=2)))

    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [step.epoch for step in steps] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert steps[-1].loss < steps[0].loss
    assert not steps[0].loss.requires_grad


@pytest.mark.parametrize(("wanted", "epochs"), [(3, 1), (4, 1), (5, 2), (9, 3)])
def test_steps_overrule_epochs(wanted, epochs):
    steps = list(training_steps(line(steps=wanted, epochs=30)))

    assert len(steps) == wanted
    assert steps[-1].epoch == epochs - 1


def test_the_caller_s_steps_overrule_the_task_s():
    assert len(list(training_steps(line(steps=50), steps=2))) == 2


def test_the_seed_decides_model_and_order():
    same, other = train(line(epochs=1)), train(line(epochs=1, seed=1))

    assert torch.equal(train(line(epochs=1)).weight, same.weight)
    assert not torch.equal(other.weight, same.weight)


def test_a_loader_is_used_as_it_is():
    loader = DataLoader(samples(), batch_size=10)

    assert len(list(training_steps(line(data=lambda: loader, epochs=1)))) == 2


def test_a_list_of_batches_is_used_as_it_is():
    batches = [samples()[:3], samples()[3:6]]

    assert len(list(training_steps(line(data=lambda: batches, epochs=2)))) == 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples())


def test_an_iterable_data_set_is_put_into_batches_in_its_own_order():
    assert len(list(training_steps(line(data=Stream, epochs=1)))) == 4


def test_collate_makes_the_batches():
    def only_two(items):
        return tuple(torch.stack(part) for part in zip(*items[:2], strict=True))

    seen = []

    def loss(model, batch):
        seen.append(len(batch[0]))
        return squared_error(model, batch)

    train(line(collate=only_two, loss=loss, epochs=1))

    assert seen == [2, 2, 2, 2]


class Oddity:
    def to(self, device):
        return f"moved to {device}"


def test_all_tensors_of_a_batch_move_and_its_structure_stays():
    meta = torch.device("meta")
    batch = {"pair": Pair(torch.zeros(2), [torch.zeros(1), "word"]), "odd": Oddity(), "n": 3}

    result = moved(batch, meta)

    assert result["pair"].x.device == meta
    assert result["pair"].y[0].device == meta
    assert isinstance(result["pair"], Pair)
    assert result["pair"].y[1] == "word"
    assert (result["odd"], result["n"]) == ("moved to meta", 3)


@pytest.mark.gpu
def test_an_accelerator_is_used_when_there_is_one():
    assert train(line(device=None)).weight.device.type == "cuda"


def used_up():
    return iter([samples()[:3]])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": lambda: samples()}, "model\\(\\) returned a TensorDataset"),
        ({"data": lambda: 3}, "data\\(\\) returned a int"),
        ({"data": list}, "epoch 0 had no batch"),
        ({"data": used_up}, "epoch 1 had no batch"),
        ({"optimizer": lambda model: None}, "optimizer\\(\\) returned a NoneType"),
        ({"loss": lambda model, batch: 1.0}, "loss\\(\\) returned a float"),
        ({"loss": lambda model, batch: model(batch[0])}, "tensor of shape \\(5, 1\\)"),
    ],
)
def test_a_function_that_returns_the_wrong_thing_is_named(changes, complaint):
    with pytest.raises(UserError, match=complaint):
        train(line(**changes))
