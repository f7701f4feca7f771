"""The session: listeners cannot end the training, techniques cannot either."""

from dataclasses import dataclass

import pytest

from flatout.agent.session import Session
from flatout.records.errors import NotApplicable
from flatout.records.technique import Numerics, Technique
from flatout.records.trial_result import LoaderSeen
from flatout.records.trial_spec import TrialSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubler(Technique):
    """Doubles a loader's batch size, or fails in the way that is asked for."""

    addresses = frozenset()
    numerics = Numerics.TRAINING
    trouble: str = ""

    @classmethod
    def candidates(cls, profile, machine):
        return ()

    def predict(self, profile, machine):
        raise NotImplementedError

    def loader(self, arguments):
        if self.trouble == "refuse":
            raise NotApplicable("there is nothing to double")
        if self.trouble == "break":
            raise RuntimeError("cannot double")
        return {**arguments, "batch_size": 2 * arguments["batch_size"]}


def test_technique_changes_the_value():
    session = Session(TrialSpec(), [Doubler()])

    assert session.transform("loader", {"batch_size": 4}) == {"batch_size": 8}
    assert list(session.status.values()) == [("applied", "")]


@pytest.mark.parametrize(
    ("trouble", "status"),
    [
        ("refuse", ("not_applicable", "there is nothing to double")),
        ("break", ("failed", "RuntimeError: cannot double")),
    ],
)
def test_technique_in_trouble_leaves_the_value_and_says_so(trouble, status):
    session = Session(TrialSpec(), [Doubler(trouble=trouble)])

    assert session.transform("loader", {"batch_size": 4}) == {"batch_size": 4}
    assert list(session.status.values()) == [status]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves(Doubler):
    """Acts at two hook points."""

    def optimizer(self, optimizer):
        return optimizer


def test_a_technique_that_was_refused_at_one_of_its_hook_points_was_not_applied():
    session = Session(TrialSpec(), [Halves(trouble="refuse")])

    session.transform("loader", {"batch_size": 4})
    session.transform("optimizer", object())
    session.conclude()

    assert list(session.status.values()) == [("not_applicable", "there is nothing to double")]


def test_a_refusal_counts_only_where_the_technique_never_acted():
    for order in ([{"batch_size": 4}, {}], [{}, {"batch_size": 4}]):
        session = Session(TrialSpec(), [Picky()])
        for arguments in order:
            session.transform("loader", arguments)
        session.transform("optimizer", object())
        session.conclude()

        assert list(session.status.values()) == [("applied", "")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picky(Halves):
    """Refuses loaders without a batch size."""

    def loader(self, arguments):
        if "batch_size" not in arguments:
            raise NotApplicable("no batches")
        return arguments


@pytest.mark.chaos
def test_listener_that_fails_is_recorded_and_the_others_go_on():
    session, heard = Session(TrialSpec()), []

    def broken(_):
        raise ValueError("probe broke")

    session.on("epoch", broken)
    session.on("epoch", heard.append)
    session.fire("epoch", "train.py#0")

    assert heard == ["train.py#0"]
    assert "probe broke" in session.errors[0]


def test_unknown_event_is_named():
    with pytest.raises(ValueError, match="no event 'batches'"):
        Session(TrialSpec()).on("batches", print)


def test_running_session_keeps_no_segments():
    session = Session(TrialSpec(mode="run"))

    for _ in range(3):
        session.end_segment(0)

    assert session.segments == []
    assert session.counts == {0: 3}


class Built:
    """Stands for an optimizer."""


def test_the_steps_of_an_optimizer_that_is_built_again_go_on():
    session = Session(TrialSpec(mode="run"))
    outer = Built()
    session.add_optimizer(outer)

    for task in range(1, 6):
        inner = Built()
        session.add_optimizer(inner)
        for who in (task, task, 0):
            session.end_segment(who)

    assert outer
    assert inner
    assert session.made_steps == 5
    assert len(session.counts) == 6
    assert len(session.places) == 2


@pytest.mark.parametrize(
    ("whos", "steps"),
    [([0] * 30 + [1] * 50, 80), ([0, 1] * 40, 40), ([0, 0, 0, 1] * 10, 10), ([0] * 99 + [1], 99)],
    ids=["one after the other", "in turns", "a critic and its generator", "one that hardly steps"],
)
def test_the_steps_of_optimizers_that_live_are_those_of_all_trainings(whos, steps):
    session = Session(TrialSpec(mode="run"))
    optimizers = [Built(), Built()]
    for each in optimizers:
        session.add_optimizer(each)

    for who in whos:
        session.end_segment(who)

    assert session.made_steps == steps


def test_optimizers_that_are_gone_take_no_time_of_later_steps():
    session = Session(TrialSpec(mode="run"))
    for _ in range(100):
        session.add_optimizer(Built())

    assert session.optimizer_count == 100
    assert len(session._optimizers.data) == 0
    assert session.optimizers == []
    assert (session.lives(99), session.lives(100)) == (False, True)


def test_a_session_that_is_over_does_not_begin_again_in_a_forked_child():
    session = Session(TrialSpec())
    session.leave()

    session._forked()

    assert not session.is_mine()


def test_a_forked_worker_did_not_train_in_the_thread_that_its_parent_trains_in():
    session = Session(TrialSpec())
    session.trains_elsewhere = True

    session._forked()

    assert not session.trains_elsewhere


def fed_by(*turns):
    """Return the training loaders, after loaders gave batches and models were called in turn."""
    session = Session(TrialSpec())
    session.loaders |= {name: LoaderSeen(name, {}) for name in ("train", "more", "held out")}
    for turn in turns:
        if turn == "trains":
            session.segment.calls = [1]  # of a step of its own
            session.note_trained_batches()
        elif turn == "tests":
            session.note_tested()
        elif turn.startswith("no "):
            session.note_drained(turn.removeprefix("no "))
        else:
            session.note_drawn(turn)
    return [name for name, seen in session.loaders.items() if seen.is_training]


UPDATE = ("train", "trains")
EVALUATION = ("held out", "tests") * 3


@pytest.mark.parametrize(
    ("turns", "training"),
    [
        ((*("train", "more"), "trains") * 20, ["train", "more"]),
        (("train", *["more"] * 7, "trains") * 20, ["train", "more"]),
        (("train", "trains", "more", "more", "trains") * 20, ["train", "more"]),
        (("train", "more", "tests", "trains") * 20, ["train", "more"]),
        (("train", *EVALUATION, "held out", "trains", *UPDATE * 3) * 5, ["train"]),
        ((*EVALUATION, *UPDATE * 3) * 5, ["train"]),
        ((*EVALUATION, "no held out", *["trains"] * 9) * 5, []),
        ((*("train", "tests") * 3, "no train", *UPDATE * 3) * 5, ["train"]),
        (("held out", *UPDATE * 20), ["train"]),
        (("held out", *UPDATE * 4), ["train"]),
        (("held out", *["trains"] * 20), []),
        ((*UPDATE * 20, *("more", "trains") * 20), ["train", "more"]),
        (("train", *["trains"] * 12) * 20, ["train"]),
        ((*["train"] * 4, *["trains"] * 4) * 20, ["train"]),
        (("held out", *["train"] * 4, "no train", *["trains"] * 20), ["train"]),
    ],
    ids=[
        "one batch each",
        "several of the second",
        "several in a second call",
        "a teacher looks at one",
        "evaluated before a batch is used",
        "evaluated in part between steps",
        "evaluated where the loop makes its batches",
        "evaluated on what it is trained on",
        "shown once",
        "shown once before few steps",
        "shown once where the loop makes its batches",
        "one stage after the other",
        "several steps a batch",
        "drawn ahead",
        "all drawn before",
    ],
)
def test_the_loaders_whose_batches_are_trained_on_are_told_from_the_others(turns, training):
    assert fed_by(*turns) == training
