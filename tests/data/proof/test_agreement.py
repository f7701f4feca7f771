import itertools
import threading

import pytest
from torch.distributed import HashStore

from flatout.data.proof import agreement
from flatout.records.errors import NotApplicable


class Ranks:
    """Ranks as threads of this process, with one store between them."""

    def __init__(self, monkeypatch, size):
        self.size, self.store, self.own = size, HashStore(), threading.local()
        self.answers = [None] * size
        monkeypatch.setattr(agreement, "group_size", lambda: size)
        monkeypatch.setattr(agreement, "_store_and_rank", lambda: (self.store, self.own.rank))
        monkeypatch.setattr(agreement, "_numbers", itertools.repeat(0))

    def ask(self, rank, claim, trouble=""):
        self.own.rank = rank
        try:
            agreement.agree(claim, trouble, ranks=self.size)
        except NotApplicable as reason:
            self.answers[rank] = str(reason)
        else:
            self.answers[rank] = "agreed"

    def all_ask(self, *words):
        threads = [
            threading.Thread(target=self.ask, args=(rank, *word)) for rank, word in enumerate(words)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.answers


def test_ranks_that_claim_the_same_agree(monkeypatch):
    assert Ranks(monkeypatch, 3).all_ask("a", "a", "a") == ["agreed"] * 3


def test_the_trouble_of_one_rank_is_that_of_all(monkeypatch):
    answers = Ranks(monkeypatch, 3).all_ask(("a",), ("", "no room"), ("a",))

    assert answers == ["rank 1: no room"] * 3


def test_other_claims_are_no_agreement(monkeypatch):
    answers = Ranks(monkeypatch, 3).all_ask("a", "a", "b")

    assert answers == ["rank 2 has other data than rank 0"] * 3


def test_a_rank_that_never_asks_stops_the_others(monkeypatch):
    monkeypatch.setattr(agreement, "WAIT_S", 0.1)

    answers = Ranks(monkeypatch, 3).all_ask("a", "a")

    # Which of the two gives up first, the clock decides; the other one is told.
    assert answers[0] == answers[1] != "agreed"


def test_a_rank_that_comes_late_is_bound_by_what_was_decided(monkeypatch):
    monkeypatch.setattr(agreement, "WAIT_S", 0.1)
    ranks = Ranks(monkeypatch, 2)
    ranks.ask(0, "a")

    ranks.ask(1, "a")

    assert ranks.answers == ["not every rank asked for the same within 0 s"] * 2


def test_a_first_rank_that_comes_late_is_bound_too(monkeypatch):
    monkeypatch.setattr(agreement, "WAIT_S", 0.1)
    ranks = Ranks(monkeypatch, 2)
    ranks.ask(1, "a")

    ranks.ask(0, "a")

    assert ranks.answers == ["rank 0 did not decide within 0 s"] * 2


def test_more_ranks_than_the_group_has_cannot_agree(monkeypatch):
    ranks = Ranks(monkeypatch, 2)

    with pytest.raises(NotApplicable, match="4 ranks have no process group"):
        agreement.agree("a", "", ranks=4)
    assert ranks.store.num_keys() == 0
