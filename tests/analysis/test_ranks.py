import pytest

from flatout.analysis.ranks import RankView, compare_ranks, leading
from flatout.records.profile import PHASES
from flatout.records.trial_result import RankPlace, Segment, TrialResult
from tests.techniques.facts import profile


def profile_of(samples, phases):
    whole = dict.fromkeys(PHASES, 0.0) | phases
    step = sum(whole.values())
    return profile(phases_ms=whole, samples_per_s=1e3 * samples / step, samples_per_step=samples)


def view(rank, waits, samples=8, **phases):
    communication = None if waits is None else {"backward": waits}
    return RankView(rank=rank, profile=profile_of(samples, phases), communication_ms=communication)


def straggler(*views):
    return [(rank.rank, rank.because) for rank in compare_ranks(views) if rank.is_straggler]


def test_slow_loader_is_named_though_all_steps_take_equally_long():
    found = straggler(
        view(0, 50.0, data_wait=1.0, forward=20.0, backward=79.0),
        view(1, 1.0, data_wait=50.0, forward=20.0, backward=30.0),
        view(2, 50.0, data_wait=1.0, forward=20.0, backward=79.0),
    )

    assert found == [(1, "data wait takes it 50.0 ms a step against 1.00 ms on the others")]


def test_slow_backward_is_told_from_waiting_in_it():
    found = straggler(
        view(0, 60.0, forward=20.0, backward=80.0), view(1, 0.0, forward=20.0, backward=80.0)
    )

    assert [rank for rank, _ in found] == [1]
    assert "backward takes it 80.0 ms" in found[0][1]


def test_larger_batch_is_named():
    found = straggler(
        view(0, 20.0, samples=8, forward=30.0, backward=70.0),
        view(1, 0.0, samples=16, forward=50.0, backward=50.0),
    )

    assert "its steps hold 16 samples against 8" in found[0][1]


def test_equal_ranks_have_no_straggler():
    assert straggler(view(0, 5.0, backward=100.0), view(1, 6.0, backward=100.0)) == []


def test_where_the_host_cannot_see_waiting_the_backward_does_not_count():
    found = straggler(
        view(0, None, forward=20.0, backward=80.0), view(1, None, forward=60.0, backward=40.0)
    )

    assert [rank for rank, _ in found] == [1]
    assert "forward" in found[0][1]


def test_time_in_collectives_is_added_up():
    ranks = compare_ranks([view(0, 5.0, backward=100.0), view(1, None, backward=100.0)])

    assert [rank.exposed_communication_ms for rank in ranks] == [5.0, None]


def test_single_rank_is_no_straggler():
    assert straggler(view(0, 0.0, forward=100.0)) == []


@pytest.mark.parametrize(("ranks", "expected"), [((1, 0), 0), ((3, 2), 2), ((None, None), None)])
def test_lowest_rank_stands_for_the_training(ranks, expected):
    results = [
        TrialResult(ranks=None if rank is None else RankPlace(rank=rank), segments=(Segment(),))
        for rank in ranks
    ]

    found = leading(results)

    assert (found.ranks.rank if found.ranks else None) == expected


def test_rank_without_steps_does_not_stand_for_the_training():
    results = [
        TrialResult(ranks=RankPlace(rank=0)),
        TrialResult(ranks=RankPlace(rank=1), segments=(Segment(),)),
    ]

    assert leading(results).ranks.rank == 1
