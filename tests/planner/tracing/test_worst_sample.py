import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from flatout.planner.tracing.script_data import ALIKE, WorstBatches, largest, worst_case
from flatout.workflow.plan import PlanOptions, plan

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader

texts = [torch.zeros(4 + (900 if n == 71 else n % 5), dtype=torch.long) for n in range(100)]
pad = nn.utils.rnn.pad_sequence
loader = DataLoader(texts, batch_size=4, collate_fn=lambda rows: pad(rows, batch_first=True))
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 50)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in loader:
    batch = batch.to(device)
    loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


class Lengths:
    def __init__(self, lengths):
        self.lengths, self.reads = lengths, 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.reads += 1
        return {"ids": torch.zeros(self.lengths[index])}


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


def test_the_largest_sample_is_found():
    assert largest(Lengths([3, 9, 4])) == (1, 3, False)


def test_samples_of_one_size_are_soon_believed():
    data = Lengths([5] * 10_000)

    assert largest(data) == (0, ALIKE, True)
    assert data.reads == ALIKE
    assert worst_case({"dataset": data}, pytest.fail) == {}


def test_a_loader_draws_the_largest_sample_only():
    said = []
    changed = worst_case({"dataset": Lengths([3, 9, 4]), "shuffle": True}, said.append)

    loader = DataLoader(Lengths([3, 9, 4]), batch_size=2, **changed)

    assert next(iter(loader))["ids"].shape == (2, 9)
    assert "the largest of 3 that were looked at, number 1" in said[0]


@pytest.mark.parametrize(
    "samples",
    [
        [{"input_ids": [1] * n, "label": 0} for n in (3, 9, 4)],
        [(f"{'word ' * n}", 1) for n in (3, 9, 4)],
        [{"x": np.zeros(n, dtype=np.float32), "y": np.int64(1)} for n in (3, 9, 4)],
        [{"ids": torch.zeros(n), "path": "x" * (20 - n)} for n in (3, 9, 4)],
    ],
)
def test_tokens_in_lists_texts_and_arrays_have_sizes_too(samples):
    assert largest(samples) == (1, 3, False)


def test_what_is_longer_in_name_only_is_alike():
    samples = [{"image": torch.zeros(3, 8, 8), "path": "x" * n} for n in (3, 9, 4)]

    assert largest(samples) == (0, 3, True)


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_a_small_data_set_s_last_batch_is_full_and_the_sampler_s_methods_stay(is_shuffled):
    data = Lengths([5] * 9)
    arguments = {"dataset": data, "batch_size": 4, "shuffle": is_shuffled}

    loader = DataLoader(**{**arguments, **worst_case(arguments, pytest.fail)})

    assert [len(batch["ids"]) for batch in loader] == [4, 4, 4]
    assert len(loader) == 3
    assert loader.sampler.data_source is data


@pytest.mark.parametrize(
    "arguments", [{"batch_size": 4, "drop_last": True}, {"batch_size": 3}, {"batch_size": 10}]
)
def test_batches_that_are_full_or_all_there_is_stay_as_they_are(arguments):
    assert worst_case({"dataset": Lengths([5] * 9), **arguments}, pytest.fail) == {}


def test_a_sampler_that_is_told_the_epoch_can_be_told_where_samples_differ():
    data = Lengths([3, 9, 4])
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    arguments = {"dataset": data, "batch_size": 2, "sampler": sampler}

    loader = DataLoader(**{**arguments, **worst_case(arguments, lambda _: None)})
    loader.sampler.set_epoch(3)

    assert sampler.epoch == 3
    assert [tuple(batch["ids"].shape) for batch in loader] == [(2, 9), (2, 9)]


def test_a_batch_sampler_is_followed_in_number_and_size():
    data = Lengths([3, 9, 4, 5, 6])
    sampler = BatchSampler(SequentialSampler(data), 2, drop_last=False)

    changed = worst_case({"dataset": data, "batch_sampler": sampler}, lambda _: None)
    loader = DataLoader(data, **changed)

    assert [tuple(batch["ids"].shape) for batch in loader] == [(2, 9)] * 3
    assert changed["batch_sampler"].sampler is sampler.sampler


def test_the_last_batch_of_a_batch_sampler_is_filled_where_samples_are_alike():
    data = Lengths([5] * 9)
    sampler = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    arguments = {"dataset": data, "batch_sampler": sampler}

    loader = DataLoader(**{**arguments, **worst_case(arguments, pytest.fail)})

    assert [len(batch["ids"]) for batch in loader] == [4, 4, 4]


def test_another_batch_is_made_of_what_a_sampler_draws():
    sampler = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)

    assert list(WorstBatches(sampler, 3)) == [[0, 1, 0], [2, 3, 2], [4, 4, 4]]
    assert list(WorstBatches(sampler, 1)) == [[0], [2], [4]]


@pytest.mark.parametrize(
    "arguments", [{"dataset": Stream()}, {"dataset": Lengths([1, 2]), "batch_sampler": [[0]]}]
)
def test_what_cannot_be_looked_at_is_said(arguments):
    said = []

    assert worst_case(arguments, said.append) == {}
    assert "was not looked at" in said[0]


def test_data_that_fails_is_said_and_left_to_the_script():
    said = []

    assert worst_case({"dataset": Lengths([2, -1])}, said.append) == {}
    assert "could not be looked at" in said[0]


def test_a_script_is_planned_for_its_longest_text(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    found = plan("train.py", (), PlanOptions(gpu="l4")).plan

    assert found.batch == 4
    assert any("number 71" in note for note in found.notes)
    assert any(tensor.shape[:2] == (4, 904) for tensor in found.largest)
