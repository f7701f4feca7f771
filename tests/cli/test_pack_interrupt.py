"""Ctrl-C that the interpreter swallowed stops a pack all the same."""

import contextlib
import os
import signal

import pytest

from flatout.cli.pack import heeding_ctrl_c
from flatout.records.live import Progress

NOW = Progress(trying="packing", done_share=0.5, elapsed_s=1.0, left_s=1.0)


def test_an_interrupt_that_got_lost_is_raised_by_the_next_progress():
    told = []

    with heeding_ctrl_c(told.append) as heeding:
        heeding(NOW)
        with contextlib.suppress(KeyboardInterrupt):  # as a weak reference's callback would
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            heeding(NOW)

    assert told == [NOW]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_ctrl_c_is_ignored_it_stays_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with heeding_ctrl_c(lambda _: None) as heeding:
            os.kill(os.getpid(), signal.SIGINT)
            heeding(NOW)
    finally:
        signal.signal(signal.SIGINT, previous)
