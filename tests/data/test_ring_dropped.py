"""An iterator that is let go of at any line, while the ring looks which copies have ended."""

import itertools
import os
from types import SimpleNamespace

import pytest
import torch

from flatout.data.byte_batches import ring


class Event:
    """Drops an iterator when it is looked at, as a collection may at any line."""

    def __init__(self, drops):
        self.drops, self.has_ended = drops, False

    def record(self, stream):
        pass

    def query(self):
        next(self.drops)()
        return self.has_ended

    def __eq__(self, other):
        next(self.drops)()
        return self is other

    __hash__ = object.__hash__


def in_use(number):
    """Return a worker's block as the training process has it, and what gives it back."""
    memory = ring.new_shared(ring.room_for(101))
    memory[-1] = ring.BUSY
    _, held = ring.receive(os.getpid(), number, memory, 100)
    return memory, held


@pytest.mark.parametrize("looks", range(8))
def test_no_block_is_written_to_while_its_copy_is_under_way(monkeypatch, looks):
    def drop():
        events[1].has_ended = True
        ring.forget_ended()

    nothing = itertools.repeat(int)
    drops = itertools.chain(itertools.islice(nothing, looks), [drop], nothing)
    monkeypatch.setattr(ring, "_THEIRS", {})
    blocks = [in_use(number) for number in range(5)]
    events = [Event(drops) for _ in blocks]
    made = iter(events).__next__
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=made, current_stream=str))
    monkeypatch.setattr(ring.Shared, "is_locked", True)
    for _, held in blocks:
        held.give_back_copied("cuda")
    memories = [memory for memory, _ in blocks]
    del blocks, held
    events[0].has_ended = True

    ring.give_back_copied()
    ring.give_back_copied()

    free, busy = ring.FREE, ring.BUSY
    assert [int(memory[-1]) for memory in memories] == [free, free, busy, busy, busy]
    assert len(ring._COPYING) == 3
    ring._COPYING.clear()
