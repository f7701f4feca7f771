"""How many samples a batch holds is what the sampler chose for it, whatever its shapes are."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    dataloader,
)

from flatout.agent.samples import CHOSEN, note_chosen, samples_of

LENGTHS = [7, 3, 9, 5, 4, 6, 8, 2, 3, 5]
SEQUENCES = [torch.zeros(length, 4) for length in LENGTHS]


class Buckets:
    """A batch sampler without a size: its batches differ."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        numbers = iter(range(len(SEQUENCES)))
        for size in self.sizes:
            yield [next(numbers) for _ in range(size)]


def graph(sequences):
    """Put sequences one after the other, as the nodes of graphs."""
    return torch.cat(sequences), torch.tensor([len(sequence) for sequence in sequences])


@pytest.fixture
def noted(monkeypatch):
    kind = dataloader._BaseDataLoaderIter
    monkeypatch.setattr(kind, "_next_index", kind._next_index)
    monkeypatch.setattr(kind, "_reset", kind._reset)
    note_chosen(kind)


def counted(loader):
    """Return the samples of each batch of one epoch."""
    iterator = iter(loader)
    return [samples_of(iterator, batch, loader.batch_size) for batch in iterator]


@pytest.mark.parametrize("collate", [pad_sequence, list, graph])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("size", "sizes"), [(4, [4, 4, 2]), (3, [3, 3, 3, 1])])
def test_samples_are_counted_whatever_the_collation_makes_of_them(
    noted, collate, workers, size, sizes
):
    loader = DataLoader(SEQUENCES, batch_size=size, collate_fn=collate, num_workers=workers)

    assert counted(loader) == sizes


def test_batches_of_a_sampler_of_the_script_s_own_have_their_own_sizes(noted):
    loader = DataLoader(SEQUENCES, batch_sampler=Buckets(2, 5, 3), collate_fn=list)

    assert counted(loader) == [2, 5, 3]


def test_a_sampler_that_hands_lists_to_the_data_set_tells_their_sizes(noted):
    class Whole:
        def __len__(self):
            return len(SEQUENCES)

        def __getitem__(self, numbers):
            return pad_sequence([SEQUENCES[number] for number in numbers])

    sampler = BatchSampler(SequentialSampler(SEQUENCES), 4, drop_last=False)

    assert counted(DataLoader(Whole(), batch_size=None, sampler=sampler)) == [4, 4, 2]


def test_workers_that_live_on_begin_each_epoch_anew(noted):
    loader = DataLoader(
        SEQUENCES, batch_size=4, collate_fn=list, num_workers=1, persistent_workers=True
    )

    begun = iter(loader)
    next(begun)  # an epoch that is left early
    assert [counted(loader) for _ in range(2)] == [[4, 4, 2]] * 2


def test_an_epoch_that_is_gone_on_with_is_counted_from_there(noted):
    iterator = iter(DataLoader(SEQUENCES, batch_sampler=Buckets(2, 5, 3), collate_fn=list))
    iterator._num_yielded = 7  # what a loader sets that keeps its state

    assert [samples_of(iterator, batch) for batch in iterator] == [2, 5, 3]


def test_of_a_single_item_and_of_an_iterable_data_set_the_shapes_tell(noted):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.zeros(10, 3))

    whole = DataLoader([torch.zeros(16, 3), torch.zeros(8, 3)], collate_fn=lambda items: items[0])

    assert counted(whole) == [16, 8]
    assert counted(DataLoader(Endless(), batch_size=4)) == [4, 4, 2]


class Lines(IterableDataset):
    """A stream of texts that the loop tokenizes."""

    def __iter__(self):
        return iter("abcdefghij")


@pytest.mark.parametrize("collate", [None, lambda texts: {"text": texts}])
def test_texts_of_a_stream_are_counted(noted, collate):
    assert counted(DataLoader(Lines(), batch_size=4, collate_fn=collate)) == [4, 4, 2]


def test_what_is_kept_does_not_grow_with_the_epoch(noted, monkeypatch):
    monkeypatch.setattr("flatout.agent.samples.MOST_AHEAD", 2)
    iterator = iter(DataLoader(SEQUENCES, batch_size=2, collate_fn=list))

    seen = [samples_of(iterator, batch) for batch in iterator]

    assert seen == [2] * 5
    assert len(iterator.__dict__[CHOSEN].sizes) == 2
