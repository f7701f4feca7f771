"""Turns of a training process, with the other side of the socket in the test's hands."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest

from flatout.agent.probes import turns
from flatout.agent.session import Session
from flatout.records.trial_result import Segment
from flatout.records.trial_spec import TrialSpec


@pytest.fixture
def sides(monkeypatch):
    """Yield a session with a clock that stands, both ends of the socket, and what starts turns."""
    ours, theirs = socket.socketpair()
    session = Session(TrialSpec())
    now = [0.0]
    laps = []
    monkeypatch.setattr(
        session, "clock", SimpleNamespace(now=lambda: now[0], lap=lambda: laps.append(now[0]))
    )

    def start(*, is_first=True):
        options = {"descriptor": os.dup(ours.fileno()), "is_first": is_first, "root": os.getpid()}
        return turns.start(session, options)

    yield SimpleNamespace(session=session, now=now, laps=laps, theirs=theirs, start=start)
    ours.close()
    theirs.close()


def step(sides, seconds):
    sides.now[0] += seconds
    sides.session.fire("lap", Segment(seconds=[seconds]))


def test_a_turn_ends_with_the_step_that_fills_it_and_the_wait_is_no_time_of_the_training(sides):
    found = sides.start()
    sides.theirs.sendall(b".")

    for _ in range(4):
        step(sides, turns.TURN_S / 3.5)

    assert sides.theirs.recv(8) == b"."
    assert sides.laps == [sides.now[0]]
    assert found.turns_s == pytest.approx([turns.TURN_S / 3.5])


def test_the_first_step_of_a_turn_is_left_out_where_there_are_others(sides):
    found = sides.start()
    sides.theirs.sendall(b"..")

    for seconds in (0.15, 0.04, 0.04):
        step(sides, seconds)
    step(sides, 1.0)

    assert found.turns_s == pytest.approx([0.04, 1.0])


def test_the_second_side_waits_for_its_first_turn(sides):
    started = threading.Event()
    waiting = threading.Thread(target=lambda: (sides.start(is_first=False), started.set()))
    waiting.start()

    assert not started.wait(0.2)
    sides.theirs.sendall(b".")
    assert started.wait(10)
    waiting.join()


def test_more_steps_are_wanted_until_there_are_enough_turns(sides):
    sides.start()
    sides.theirs.sendall(b"." * turns.FEWEST_TURNS)

    wanted = []
    for _ in range(turns.FEWEST_TURNS):
        step(sides, 1.1 * turns.TURN_S)
        wanted.append(sides.session.wants_more)

    assert wanted == [True] * (turns.FEWEST_TURNS - 1) + [False]


def test_where_the_other_side_is_gone_it_goes_on_alone(sides):
    found = sides.start()
    for descriptor in (sides.theirs,):
        descriptor.shutdown(socket.SHUT_RDWR)

    for _ in range(3):
        step(sides, 1.1 * turns.TURN_S)

    assert found.is_alone
    assert not sides.session.wants_more
    assert not sides.session.errors


def test_what_a_process_does_while_it_waits_is_told(sides):
    found = sides.start()
    stop = threading.Event()

    def work():
        while not stop.is_set():
            sum(range(1000))

    busy = threading.Thread(target=work)
    busy.start()
    timer = threading.Timer(0.3, lambda: sides.theirs.sendall(b"."))
    timer.start()
    step(sides, 1.1 * turns.TURN_S)
    stop.set()
    busy.join()
    timer.join()

    assert found.result()["busy_share"] > 0.2
    assert found.result()["threads"]
