"""Patches of one attribute: order, undo in any order, and what others put on top."""

import pytest

from flatout.agent import patching
from flatout.agent.patching import Order


class Base:
    def draw(self):
        return ["script"]

    @staticmethod
    def make():
        return ["made"]


class Loader(Base):
    pass


def saying(word):
    """Return what makes a wrapper that adds a word to what is returned."""

    def make(original):
        def said(*args):
            return [*original(*args), word]

        return said

    return make


@pytest.fixture(autouse=True)
def _leave_nothing():
    before = [dict(vars(kind)) for kind in (Base, Loader)]
    yield
    for patch in list(patching.patches()):
        if patch.owner in (Base, Loader):
            patch.undo()
    assert [dict(vars(kind)) for kind in (Base, Loader)] == before


def test_wrappers_are_in_the_order_of_their_ranks_then_of_time():
    patching.wrap(Base, "draw", saying("technique"), order=Order.TECHNIQUE)
    patching.wrap(Base, "draw", saying("first"))
    patching.wrap(Base, "draw", saying("second"))
    patching.wrap(Base, "draw", saying("guard"), order=Order.GUARD)

    assert Base().draw() == ["script", "guard", "first", "second", "technique"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
@pytest.mark.parametrize("kind", [Base, Loader])
def test_any_one_is_undone_while_the_others_stay(kind, order):
    words = ["one", "two", "three"]
    before = dict(vars(kind))
    made = [patching.wrap(kind, "draw", saying(word)) for word in words]

    for place in order:
        made[place].undo()
        words[place] = ""
        assert kind().draw() == ["script", *filter(None, words)]

    assert dict(vars(kind)) == before


def test_what_others_put_on_top_stays_on_what_they_found():
    ours = patching.wrap(Base, "draw", saying("ours"))
    covered, original = Base.draw, ours.below
    Base.draw = saying("theirs")(covered)
    above = patching.wrap(Base, "draw", saying("above"))

    assert Base().draw() == ["script", "ours", "theirs", "above"]
    ours.undo()
    above.undo()
    assert Base().draw() == ["script", "ours", "theirs"]

    Base.draw = covered  # they take theirs away
    patching.wrap(Base, "draw", saying("later")).undo()
    assert Base.draw is original


def test_put_on_again_it_is_the_same_object():
    patch = patching.wrap(Base, "draw", saying("ours"))
    first = Base.draw

    patch.undo()
    patch.apply()

    assert Base.draw is first


def test_a_static_method_is_wrapped_as_what_it_calls():
    with patching.wrap(Base, "make", lambda make: staticmethod(lambda: [*make(), "ours"])):
        assert Base.make() == ["made", "ours"]

    assert Base.make() == ["made"]


def test_patches_are_listed_from_the_inside_out_with_who_made_them():
    patching.wrap(Base, "draw", saying("outside"), order=Order.TECHNIQUE)
    patching.wrap(Base, "draw", saying("inside"))

    found = [patch for patch in patching.patches() if patch.owner is Base]

    assert [str(patch) for patch in found] == [f"Base.draw by {__name__}"] * 2
    assert [patch.order for patch in found] == [Order.HOOK, Order.TECHNIQUE]


def test_a_wrapper_that_cannot_be_made_leaves_all_as_it_was():
    patching.wrap(Base, "draw", saying("ours"))

    with pytest.raises(ZeroDivisionError):
        patching.wrap(Base, "draw", lambda _: 1 / 0)

    assert Base().draw() == ["script", "ours"]
    assert len([patch for patch in patching.patches() if patch.owner is Base]) == 1
