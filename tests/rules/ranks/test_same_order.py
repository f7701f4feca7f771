import pytest

from flatout.rules.ranks.same_order import check
from tests.rules.rank_facts import rank
from tests.techniques.facts import loader, machine, profile

SHUFFLED = (17, 4, 932, 8, 55, 3, 71, 20)
OTHER = (4, 17, 932, 8, 55, 3, 71, 20)


def known(*epochs, sampler="DistributedSampler", size=1000, ranks=2):
    facts = loader(sampler=sampler, epoch_samples=epochs, dataset_len=size)
    return profile(loaders=(facts,), ranks=tuple(map(rank, range(ranks))))


def test_epochs_that_begin_alike_are_found_with_their_samples():
    finding = check(known(SHUFFLED, SHUFFLED), machine())

    assert finding.because.startswith("2 epochs began with the same samples (17, 4, 932")


@pytest.mark.parametrize(
    "silent",
    [
        known(SHUFFLED, OTHER),
        known(SHUFFLED),
        known((0, 2, 4, 6), (0, 2, 4, 6)),
        known(SHUFFLED, SHUFFLED, sampler="LengthSampler"),
        known(SHUFFLED, SHUFFLED, ranks=0),
        known((1, 0), (1, 0), size=2),
    ],
    ids=["reordered", "one epoch", "in order", "own sampler", "one process", "by chance"],
)
def test_it_is_silent_where_the_order_changes_or_was_chosen(silent):
    assert check(silent, machine()) is None
