from flatout.rules.ranks.ranks_on_one_gpu import check
from tests.rules.rank_facts import rank
from tests.techniques.facts import gpu, machine, profile

TWO = machine(devices=(gpu(), gpu()))


def known(*devices):
    return profile(ranks=tuple(rank(n, device=device) for n, device in enumerate(devices)))


def test_ranks_on_the_same_device_are_counted():
    finding = check(known("GPU-1", "GPU-1"), TWO)

    assert finding.because == "2 ranks train on one GPU, and there are 2"
    assert finding.share == 0.5


def test_it_is_silent_where_each_has_its_own_or_there_is_one():
    assert check(known("GPU-1", "GPU-2"), TWO) is None
    assert check(known("GPU-1", "GPU-1"), machine(devices=(gpu(),))) is None
    assert check(known("", ""), TWO) is None
