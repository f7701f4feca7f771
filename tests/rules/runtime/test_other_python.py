import pytest

from flatout.records.journey import TRAINING, Journey
from flatout.rules.runtime.other_python import check
from tests.rules.journey_facts import leg
from tests.techniques.facts import loader, machine, model, profile

TURNS = {"next_loader": {"workers": "more"}}


def looping(other_ms=100.0, **changes):
    known = {"phases_ms": {"other": other_ms}, "loaders": (loader(),), "models": (model(),)}
    return profile(**known | changes)


def journey(**legs):
    return Journey(legs=tuple(leg(name, ms, where=TRAINING) for name, ms in legs.items()))


def test_the_rest_of_the_loop_is_reported_with_its_numbers():
    finding = check(looping(), machine())

    assert finding.share == 0.5
    assert finding.because == (
        "100 ms of 200 ms (50 %, n=20) pass outside loading, trained model and optimizer"
    )
    assert "flatout measure" in finding.next


def test_it_is_silent_below_a_tenth():
    assert check(looping(10.0), machine()) is None


@pytest.mark.parametrize(
    ("seen", "outside", "advice"),
    [
        ({"loaders": ()}, "outside trained model and optimizer", "let a DataLoader make them"),
        ({"models": ()}, "outside loading, backward and optimizer", "call the model itself"),
        ({"loaders": (), "models": ()}, "outside backward and optimizer", "call the model itself"),
    ],
    ids=["batches made by hand", "no root", "neither"],
)
def test_what_nobody_saw_is_not_said_to_be_seen(seen, outside, advice):
    finding = check(looping(**seen), machine())

    assert finding.because.endswith(outside)
    assert advice in finding.next


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"eval_ms": 60.0}, "; 60.0 ms of it are evaluation"),
        ({"journey": journey(loss=30.0, other=70.0)}, "; 30.0 ms of it are the loss"),
        ({"journey": journey(loss=5.0, sync=40.0, other=55.0)}, "; 40.0 ms of it are copies"),
        ({"journey": journey(loss=5.0, other=95.0)}, "model and optimizer"),
        ({"eval_ms": 60.0, "journey": journey(other=100.0)}, "; 60.0 ms of it are evaluation"),
    ],
    ids=["evaluation", "loss", "copies", "nothing to tell apart", "evaluation is in the leg"],
)
def test_the_largest_part_that_is_known_is_named(parts, named):
    assert named in check(looping(**parts), machine()).because
    assert check(looping(**parts), machine()).because.count(" of it are ") <= 1


def test_evaluation_in_every_step_is_to_be_made_more_seldom():
    finding = check(looping(loaders=(), eval_ms=60.0), machine())

    assert finding.next.startswith("evaluate less often")


@pytest.mark.parametrize("seen", [{}, {"loaders": ()}, {"models": ()}, {"eval_ms": 60.0}])
def test_nothing_that_the_update_needs_is_to_be_skipped(seen):
    advice = check(looping(**seen), machine()).next

    assert [word for word in ("loss", "gradient", "norm", "clip") if word in advice] == []
    assert ("tenth step" in advice) == (
        "printing, logging and metrics may run every tenth step, what" in advice
    )
