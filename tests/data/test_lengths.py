import pytest
import torch

from flatout.data.padding import SimilarLengths, length_of, lengths_of
from flatout.records.errors import NotApplicable
from tests.data.texts import Texts
from tests.techniques.data.samples import Numbers

LENGTHS = torch.randint(1, 200, (1003,), generator=torch.Generator().manual_seed(0)).tolist()


def batches(seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    options = {"batch_size": 10, "window": 20, "generator": generator}
    return SimilarLengths(LENGTHS, **options | changes)


def padding_of(order):
    tokens = sum(LENGTHS[i] for batch in order for i in batch)
    return 1 - tokens / sum(len(batch) * max(LENGTHS[i] for i in batch) for batch in order)


def test_tokens_are_counted_by_several_processes():
    assert lengths_of(Texts(20), processes=3) == [1 + number % 6 for number in range(20)]


def test_samples_without_tokens_are_named():
    with pytest.raises(NotApplicable, match="no input_ids"):
        lengths_of(Numbers(), processes=2)


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        ({"input_ids": [1, 2, 3]}, 3),
        ({"input_ids": torch.zeros(9), "attention_mask": torch.tensor([1, 1, 0])}, 2),
        ((torch.tensor([4, 5]), 1), 2),
        ([4, 5, 6], 3),
    ],
)
def test_the_length_is_that_of_the_tokens(sample, length):
    assert length_of(sample) == length


def test_every_sample_comes_once_in_batches_of_the_asked_size():
    order = list(batches())

    assert sorted(i for batch in order for i in batch) == list(range(1003))
    assert [len(batch) for batch in order] == [10] * 100 + [3]
    assert len(batches()) == 101


def test_a_last_batch_that_is_short_can_be_dropped():
    order = list(batches(drop_last=True))

    assert {len(batch) for batch in order} == {10}
    assert len(order) == len(batches(drop_last=True)) == 100


def test_padding_shrinks_to_a_tenth():
    plain = torch.randperm(1003).tolist()
    shuffled = [plain[i : i + 10] for i in range(0, 1000, 10)]

    assert padding_of(list(batches())) < 0.15 * padding_of(shuffled)


def test_short_and_long_batches_are_mixed():
    order = list(batches())[:100]

    longest = torch.tensor([max(LENGTHS[i] for i in batch) for batch in order], dtype=torch.float)
    after = torch.corrcoef(torch.stack([longest[:-1], longest[1:]]))[0, 1]
    assert abs(after) < 0.3


def test_epochs_differ_and_seeds_repeat():
    twice = batches()

    first, second = list(twice), list(twice)

    assert first != second
    assert first == list(batches())


def test_without_a_generator_one_number_of_the_trainers_stream_is_drawn():
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    expected = torch.rand(1)
    torch.manual_seed(0)

    list(batches(generator=None))

    assert torch.rand(1) == expected


def test_sizes_without_sense_are_refused():
    with pytest.raises(ValueError, match="batch_size=0"):
        SimilarLengths([1], batch_size=0, window=1)
