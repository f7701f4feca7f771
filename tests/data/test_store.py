import gc
import multiprocessing
import os
import pickle
import signal
import weakref
from pathlib import Path

import pytest

from flatout.data import caching as stores
from flatout.data.caching import ByteStore
from flatout.records.errors import NotApplicable


def test_what_was_added_is_found_and_the_rest_is_not():
    store = ByteStore(slots=100, budget_bytes=10_000)

    assert store.add(7, [b"abc", memoryview(b"def")])

    assert bytes(store.find(7)) == b"abcdef"
    assert store.find(8) is None
    assert store.count == 1


def test_a_key_keeps_its_first_value():
    store = ByteStore(slots=100, budget_bytes=10_000)
    store.add(7, [b"first"])

    assert store.add(7, [b"second"])

    assert bytes(store.find(7)) == b"first"


def test_what_does_not_fit_is_refused_and_the_rest_stays():
    store = ByteStore(slots=100, budget_bytes=256)

    added = [store.add(key, [bytes(100)]) for key in (1, 2, 3)]

    assert added == [True, True, False]
    assert store.count == 2
    assert store.used_bytes <= 256


def test_keys_that_meet_in_a_slot_are_told_apart():
    store = ByteStore(slots=20, budget_bytes=10_000)
    for key in (5, 25, 45):
        store.add(key, [b"%d" % key])

    assert [bytes(store.find(key)) for key in (5, 25, 45)] == [b"5", b"25", b"45"]


def _add_all(store, first):
    for key in range(first, 1001, 3):
        store.add(key, [key.to_bytes(2, "little") * 50])


def test_three_processes_write_at_once_and_nothing_is_lost():
    store = ByteStore(slots=4000, budget_bytes=1_000_000)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_all, args=(store, first)) for first in (1, 2, 3)]

    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert store.count == 1000
    assert all(bytes(store.find(k)) == k.to_bytes(2, "little") * 50 for k in range(1, 1001))


@pytest.mark.chaos
def test_a_writer_killed_in_its_work_locks_nobody_out():
    store = ByteStore(slots=4000, budget_bytes=1_000_000)
    writer = os.fork()
    if writer == 0:
        with store._locked():
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(writer, 0)

    assert store.add(1, [b"x"])


def _read(store, pipe):
    pipe.send(bytes(store.find(3)))


def test_a_spawned_process_finds_the_same_memory():
    store = ByteStore(slots=10, budget_bytes=1_000)
    store.add(3, [b"here"])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read, args=(store, theirs))

    reader.start()
    found = ours.recv() if ours.poll(60) else None
    reader.join()

    assert found == b"here"


def named_memory():
    """Return the shared memory with a name that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "/dev/shm/" in line}


def test_the_memory_has_no_name_and_goes_with_its_last_holder():
    before = named_memory()
    store = ByteStore(slots=10, budget_bytes=1_000)
    descriptor = store.descriptor

    assert named_memory() == before
    assert "memfd" in str(Path(f"/proc/self/fd/{descriptor}").readlink())


def test_a_store_that_nobody_holds_gives_its_memory_and_its_file_back():
    store = ByteStore(slots=10, budget_bytes=1_000)
    descriptor, gone = store.descriptor, weakref.ref(store)

    del store
    gc.collect()

    assert gone() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_sizes_without_sense_are_refused():
    with pytest.raises(ValueError, match="slots=0"):
        ByteStore(slots=0, budget_bytes=1)


def test_it_can_be_pickled_where_it_lives():
    store = ByteStore(slots=10, budget_bytes=1_000)
    again = pickle.loads(pickle.dumps(store))

    store.add(1, [b"x"])
    gc.collect()

    assert bytes(again.find(1)) == b"x"


def test_where_no_process_finds_it_sending_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(stores, "DESCRIPTORS", tmp_path / "none")

    with pytest.raises(NotApplicable, match="this system does not have"):
        pickle.dumps(ByteStore(slots=10, budget_bytes=1_000))
