from flatout.rules.ranks.same_data import check
from tests.rules.rank_facts import rank
from tests.techniques.facts import loader, machine, model, profile

DDP = (model(name="DistributedDataParallel"),)


def known(*firsts, models=DDP):
    ranks = tuple(rank(number, first_batch=first) for number, first in enumerate(firsts))
    return profile(ranks=ranks, models=models, loaders=(loader(line="train.py:4"),))


def test_equal_first_batches_of_all_ranks_are_found():
    finding = check(known("abc", "abc", "abc"), machine())

    assert finding.because.startswith("all 3 ranks began with the same samples")
    assert finding.share == 1 - 1 / 3
    assert finding.lines == ("train.py:4",)


def test_other_samples_unknown_ones_and_ranks_that_split_the_model_are_left_alone():
    assert check(known("abc", "xyz"), machine()) is None
    assert check(known("", ""), machine()) is None
    assert check(known("abc"), machine()) is None
    assert check(known("abc", "abc", models=(model(),)), machine()) is None
