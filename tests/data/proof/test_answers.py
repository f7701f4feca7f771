import pytest

from flatout.data.proof.dataset_facts import ALIKE, DatasetFacts
from flatout.records.errors import NotApplicable


class Set:
    pass


def test_a_data_set_is_looked_at_once():
    answers, asked, data = DatasetFacts(), [], Set()

    found = [answers.find(data, lambda: asked.append(1) or "found") for _ in range(3)]

    assert found == ["found"] * 3
    assert asked == [1]
    assert answers.known(data) == "found"


def test_a_refusal_is_given_again_with_its_reason():
    answers, data = DatasetFacts(), Set()

    def refuse():
        raise NotApplicable("too big")

    for ask in (lambda: answers.find(data, refuse), lambda: answers.known(data)):
        with pytest.raises(NotApplicable, match="too big"):
            ask()


def test_a_set_that_nobody_looked_at_is_not_known():
    with pytest.raises(NotApplicable, match="before the technique could see"):
        DatasetFacts().known(Set())


class Sized(Set):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def test_of_sets_alike_the_oldest_are_known_no_more():
    answers, other = DatasetFacts(), Sized(7)
    answers.find(other, lambda: "other")
    alike = [Sized(5) for _ in range(ALIKE + 2)]

    for number, data in enumerate(alike):
        answers.find(data, lambda number=number: number)

    assert answers.known(other) == "other"
    assert [answers.known(data) for data in alike[-ALIKE:]] == [ALIKE, ALIKE + 1]
    for data in alike[:-ALIKE]:
        with pytest.raises(NotApplicable, match="before the technique could see"):
            answers.known(data)
