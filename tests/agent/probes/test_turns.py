"""Turns of a training process, with the other side of the socket in the test's hands."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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

    assert sides.theirs.recv(8) == turns.MORE
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


def turns_of(sides, lengths_s, told=b"."):
    """Return, for each turn of these steps, whether more were wanted at its end."""
    sides.start()
    sides.theirs.sendall(told * len(lengths_s))
    wanted = []
    for length_s in lengths_s:
        step(sides, length_s)
        wanted.append(sides.session.wants_more)
    return wanted


def test_turns_that_differ_ask_for_more_up_to_a_number(sides):
    bursts = [turns.TURN_S * (1.1 + number % 2) for number in range(turns.MOST_TURNS)]

    assert turns_of(sides, bursts) == [True] * (turns.MOST_TURNS - 1) + [False]
    assert sides.theirs.recv(64) == turns.MORE * (turns.MOST_TURNS - 1) + turns.ENOUGH


def test_the_first_turns_are_no_reason_for_more(sides):
    lengths_s = [60.0, 3.0] + [1.1 * turns.TURN_S] * (turns.FEWEST_TURNS - 2)

    assert turns_of(sides, lengths_s)[-1] is False


def test_what_the_other_side_still_wants_goes_on(sides):
    lengths_s = [1.1 * turns.TURN_S] * (turns.FEWEST_TURNS + 2)

    assert turns_of(sides, lengths_s, told=turns.MORE)[-1] is True
    assert sides.theirs.recv(64)[-1:] == turns.ENOUGH


@pytest.mark.parametrize("is_given_work", [False, True])
def test_threads_of_an_executor_count_while_they_have_work(sides, is_given_work):
    done = threading.Event()
    with ThreadPoolExecutor(1, "makes batches") as pool:
        pool.submit(done.wait if is_given_work else int)
        time.sleep(0.0 if is_given_work else 1.0)  # it is back in its queue
        found = sides.start()
        sides.theirs.sendall(b".")
        step(sides, 1.1 * turns.TURN_S)
        done.set()

    seen = [name for name in found.result()["threads"] if "makes batches" in name]
    assert bool(seen) is is_given_work


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
