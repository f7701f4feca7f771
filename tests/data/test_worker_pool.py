"""Workers for numbered jobs: what happens while they are being started."""

from tests.support.programs import python

ENDED_AT_ITS_START = """
import itertools, os, signal, time
from flatout.data.worker_pool import perform
from flatout.records.errors import UserError

forks = itertools.count(1)
number = 0

def count():
    global number
    number = next(forks)

def late():
    time.sleep(1.5 * (number == 2))

os.register_at_fork(before=count, after_in_child=late)

def ended(*_):
    raise SystemExit(143)

signal.signal(signal.SIGTERM, ended)

def job(number, tick):
    raise UserError("the disk is full")

try:
    list(perform(job, [0, 1], workers=2, method="fork", tick=print))
except UserError as error:
    print(error, number)
"""


def test_a_worker_that_is_ended_while_it_is_forked_says_nothing():
    done = python(["-c", ENDED_AT_ITS_START])

    assert done.stdout == "the disk is full 2\n"
    assert done.stderr == ""
    assert done.returncode == 0
