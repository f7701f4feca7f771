"""When torch's samplers draw: the installed one is asked."""

from itertools import islice

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from flatout.data.proof.sampler_draws import (
    check_sampler,
    drawn_early,
    settled_batches,
    settled_numbers,
)
from flatout.records.errors import NotApplicable

DRAWS = [
    ({}, 12),
    ({"num_samples": 5}, None),
    ({"num_samples": 30}, 12),
    ({"replacement": True, "num_samples": 5}, None),
    ({"replacement": True, "num_samples": 32}, None),
    ({"replacement": True, "num_samples": 40}, 32),
]


@pytest.mark.parametrize(("options", "settled"), DRAWS)
def test_numbers_are_settled_until_the_sampler_draws_again(options, settled):
    generator = torch.Generator().manual_seed(0)
    sampler = RandomSampler(range(12), generator=generator, **options)
    numbers = iter(sampler)

    next(numbers)
    drawn_first = generator.get_state()
    list(islice(numbers, (settled or len(sampler)) - 1))

    assert settled_numbers(sampler) == settled
    assert torch.equal(generator.get_state(), drawn_first)
    list(numbers)
    assert torch.equal(generator.get_state(), drawn_first) == (settled is None)


@pytest.mark.parametrize("options", [options for options, _ in DRAWS])
def test_a_sampler_that_makes_its_own_generator_moves_no_other_one_later(options):
    sampler = RandomSampler(range(12), **options)
    numbers = iter(sampler)

    next(numbers)
    before = torch.get_rng_state()
    list(numbers)

    assert settled_numbers(sampler) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_only_whole_batches_of_the_first_draw_are_settled():
    shuffled = DataLoader(range(12), 5, shuffle=True, generator=torch.Generator())

    assert [settled_batches(shuffled, gone) for gone in (0, 1, 4)] == [2, 1, 0]
    assert settled_batches(DataLoader(range(12), 5, shuffle=True), 0) is None
    single = DataLoader(range(12), None, shuffle=True, generator=torch.Generator())
    assert settled_batches(single, 2) == 10


def test_batches_are_drawn_as_by_workers_and_none_is_lost():
    drawn = []
    batches = drawn_early((drawn.append(number) or number for number in range(5)), 3)

    assert drawn == [0, 1, 2]
    assert next(batches) == 0
    assert drawn == [0, 1, 2, 3]
    assert list(batches) == [1, 2, 3, 4]


class Own:
    """A sampler of the script's own; nobody knows when it draws."""

    def __init__(self, length=12):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


Own.__name__ = Own.__qualname__ = "RandomSampler"


def test_samplers_are_known_as_torch_s_own_and_not_by_their_name():
    for sampler in (
        RandomSampler(range(12)),
        SequentialSampler(range(12)),
        DistributedSampler(range(12), 2, 0),
        None,
    ):
        check_sampler({"sampler": sampler})

    for asked in ({"sampler": Own()}, {"batch_sampler": BatchSampler(Own(), 2, drop_last=False)}):
        with pytest.raises(NotApplicable, match="RandomSampler may draw numbers as it goes"):
            check_sampler(asked)
