import pytest

from flatout.agent.ranks import AHEAD, Ranks, rank_and_size


def rank_of(number, folder, monkeypatch, size=3):
    monkeypatch.setenv("RANK", str(number))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    rank = Ranks(str(folder))
    rank.progress(1)
    return rank


def test_all_stop_ahead_of_the_rank_that_is_furthest(tmp_path, monkeypatch):
    first, second = (rank_of(number, tmp_path, monkeypatch) for number in (0, 1))
    first.progress(10)
    second.progress(12)

    first.agree_to_stop()

    assert not second.is_over(11 + AHEAD)
    assert first.is_over(12 + AHEAD)
    assert second.is_over(12 + AHEAD)


def test_stop_is_agreed_once(tmp_path, monkeypatch):
    first = rank_of(0, tmp_path, monkeypatch)
    first.progress(10)
    first.agree_to_stop()

    first.progress(14)
    first.agree_to_stop()

    assert first.is_over(10 + AHEAD)


def test_lowest_rank_on_the_machine_leads(tmp_path, monkeypatch):
    later, lowest = (rank_of(number, tmp_path, monkeypatch) for number in (2, 1))

    assert lowest.leads
    assert not later.leads


def test_leaving_waits_for_the_others(tmp_path, monkeypatch):
    first, second = (rank_of(number, tmp_path, monkeypatch) for number in (0, 1))
    beats = []

    def beat():
        beats.append(1)
        if len(beats) == 3:
            second.leave(lambda: None)

    first.leave(beat)

    assert len(beats) == 3


@pytest.mark.parametrize(("rank", "size"), [("", ""), ("0", "1"), ("x", "2")])
def test_single_process_is_alone(rank, size, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    alone = Ranks(str(tmp_path))

    alone.progress(5)
    alone.agree_to_stop()

    assert alone.is_alone
    assert alone.leads
    assert not alone.is_over(1_000)
    assert alone.facts() is None
    assert rank_and_size() is None


def test_group_that_is_made_long_after_the_start_is_not_entered(tmp_path, monkeypatch):
    late = Ranks(str(tmp_path))
    late.progress(20)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    late.progress(21)

    assert late.is_alone
