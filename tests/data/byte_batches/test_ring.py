"""The ring's blocks: page-locked for a device, and never written to while somebody reads them.

The device is not here: CUDA's calls are recorded, and a copy that is under way is a view of the
block, which sees whatever is written there before the event says that it has ended.
"""

import contextlib
import gc
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.data.byte_batches import packed as packing
from flatout.data.byte_batches import ring
from flatout.data.byte_batches import ring as page_locking
from flatout.data.byte_batches.packed import Packed, restored, shared_bytes
from flatout.data.byte_batches.transport import PackingCollate
from tests.data.plain_pictures import plain_loader

CUDA = torch.device("cuda")


class Runtime:
    """CUDA as far as page-locking and copying ask for it, and what it was asked."""

    def __init__(self):
        self.locked, self.unlocked, self.events = {}, [], []
        self.refusal = 0
        self.is_done = True
        self.is_initialized = True
        self.in_use, self.taken = {1}, set()

    def cudaHostRegister(self, at, count, flags):  # noqa: N802  CUDA's name
        assert flags == page_locking.PORTABLE
        if not self.refusal:
            self.locked[at] = count
        return self.refusal

    def cudaHostUnregister(self, at):  # noqa: N802  CUDA's name
        assert self.locked.pop(at)
        self.unlocked.append(at)
        return 0

    def event(self):
        made = Event(self)
        self.events.append(made)
        return made


class Event:
    def __init__(self, runtime):
        self.runtime, self.stream = runtime, None
        self.has_ended = False

    def record(self, stream):
        self.stream = stream

    def query(self):
        assert self.stream == f"stream of {CUDA}"
        return self.has_ended or self.runtime.is_done


class Current:
    """Stands for `torch.cuda.device`."""

    def __init__(self, runtime, device):
        assert device in runtime.in_use, "a context would be made"
        runtime.taken.add(device)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: made.is_initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: Current(made, device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", lambda number: number in made.in_use, raising=False
    )
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(page_locking, "_TROUBLE", [])
    monkeypatch.setattr(ring, "_THEIRS", {})
    monkeypatch.setattr(ring, "_COPYING", {})
    return made


@pytest.fixture
def copies(monkeypatch):
    """Let what is sent to the device stay a view: of the memory that is being copied."""
    monkeypatch.setattr(packing, "sent", lambda values, _device: values)
    seen = []
    monkeypatch.setattr(
        packing, "looked_up", lambda values, _levels, _axis: seen.append(values) or values
    )
    return seen


def in_use(count=5000, number=0):
    """Return bytes of a worker's block as the training process gets them, and the block."""
    memory = ring.new_shared(ring.room_for(count + 1))
    memory[-1] = ring.BUSY
    values, held = ring.receive(os.getpid(), number, memory, count)
    return memory, values, held


def packed(values, held):
    return Packed(values, torch.arange(256.0)[None], None, None, held)


def test_a_block_is_locked_once_and_whole(runtime, copies):
    memory, values, held = in_use()

    for _ in range(3):
        restored(packed(values, held), CUDA)
        values, held = ring.receive(os.getpid(), 0, None, 5000)

    assert runtime.locked == {memory.data_ptr(): memory.numel()}
    assert len(copies) == 3


def test_the_pinning_thread_locks_the_block_and_copies_nothing(runtime):
    memory, values, held = in_use()
    batch = packed(values, held)

    assert batch.pin_memory() is batch
    assert batch.bytes.data_ptr() == memory.data_ptr()
    assert list(runtime.locked) == [memory.data_ptr()]
    assert int(memory[-1]) == ring.BUSY


def test_a_block_goes_back_once_its_copy_has_ended_and_not_before(runtime, copies):
    runtime.is_done = False
    memory, values, held = in_use()

    restored(packed(values, held), CUDA)
    del values, held
    gc.collect()
    ring.give_back_copied()
    assert int(memory[-1]) == ring.BUSY
    runtime.events[0].has_ended = True
    ring.give_back_copied()

    assert int(memory[-1]) == ring.FREE
    assert not ring._COPYING


def test_a_batch_that_fails_on_the_device_keeps_its_block_until_the_copy_has_ended(
    runtime, monkeypatch, copies
):
    def fail(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(packing, "looked_up", fail)
    runtime.is_done = False
    memory, values, held = in_use()

    with pytest.raises(torch.OutOfMemoryError):
        restored(packed(values, held), CUDA)

    assert int(memory[-1]) == ring.BUSY


def test_locks_go_with_the_block_and_before_its_memory(runtime, copies):
    memory, values, held = in_use()
    restored(packed(values, held), CUDA)
    ring.give_back_copied()
    at = memory.data_ptr()
    del memory, values, held, copies[:]

    ring._THEIRS.clear()
    gc.collect()

    assert runtime.unlocked == [at]
    assert runtime.locked == {}


def test_where_locking_is_refused_batches_are_copied_and_it_is_said_once(
    runtime, copies, caplog, monkeypatch
):
    runtime.refusal = 2
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x) or x.clone())

    with caplog.at_level(logging.WARNING):
        for number in range(3):
            memory, values, held = in_use(number=number)
            batch = packed(values, held).pin_memory()
            assert int(memory[-1]) == ring.FREE
            assert batch.bytes.data_ptr() != memory.data_ptr()

    assert len(pinned) == 3
    assert [record.message.count("ulimit -l") for record in caplog.records] == [1]


def test_nothing_is_asked_of_a_cuda_that_was_not_woken(runtime):
    runtime.is_initialized = False
    _, _, held = in_use()

    assert not held.lock(CUDA)
    assert runtime.locked == {}
    runtime.is_initialized = True
    assert held.lock(CUDA)


@pytest.mark.parametrize("device", [None, torch.device("cuda", 2)])
def test_a_block_is_locked_through_the_batchs_device_or_one_that_is_in_use(runtime, device):
    _, _, held = in_use()
    runtime.in_use = set()

    assert not page_locking.find_place(None)
    runtime.in_use = {2}
    assert held.lock(device)

    assert runtime.taken == {2}


def test_without_a_thread_to_be_had_nothing_is_locked(runtime, monkeypatch, caplog):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    _, _, held = in_use()

    with caplog.at_level(logging.WARNING):
        assert not held.lock(CUDA)
    assert "can't start new thread" in caplog.text


def test_a_loader_that_pins_gives_pinned_values_on_the_cpu_too(monkeypatch):
    asked = []
    plain = torch.empty_strided

    def empty_strided(*sides, pin_memory, **options):
        asked.append((pin_memory, options["device"]))
        return plain(*sides, **options)

    monkeypatch.setattr(torch, "empty_strided", empty_strided)
    steps = [("astype", np.dtype(np.float32), False), ("divide", np.float32(2), False)]
    levels = torch.arange(256.0)[None] / 2
    values = torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8)
    batch = Packed(values, levels, None, steps)
    batch.is_pinned = True

    assert torch.equal(restored(batch), values / 2)
    assert asked == [(True, "cpu")]


def test_a_forked_copy_that_lets_go_of_a_block_does_not_give_it_away():
    memory, _values, held = in_use()

    child = os.fork()
    if not child:
        held.give_back()
        os._exit(0)
    os.waitpid(child, 0)

    assert int(memory[-1]) == ring.BUSY
    held.give_back()
    assert int(memory[-1]) == ring.FREE


def test_a_field_that_a_batch_has_twice_goes_back_when_both_are_done():
    memory, _values, held = in_use()
    _, again = ring.receive(os.getpid(), 0, None, 5000)

    held.give_back()
    held.give_back()
    assert int(memory[-1]) == ring.BUSY
    again.give_back()

    assert int(memory[-1]) == ring.FREE


def test_a_block_is_in_use_as_long_as_any_view_of_it_is(monkeypatch):
    monkeypatch.setattr(ring, "_OURS", [])
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
    view = shared_bytes((2, 3, 40, 50)).numpy()[:, ::-1]

    other = shared_bytes((2, 3, 40, 50))
    assert not np.shares_memory(view, other.numpy())
    assert not ring._OURS[0].is_free
    del view

    assert ring._OURS[0].is_free


def halves_and_quarters(samples):
    """Scale whole fields, as a collation of a script's own does."""
    first, second, numbers = zip(*samples, strict=True)
    return torch.stack(first) / 2, torch.stack(second) / 4, torch.tensor(numbers)


class Pairs(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        one, other = (np.full((3, 40, 50), n, np.uint8) for n in (index, 100 + index))
        return torch.from_numpy(one).float(), torch.from_numpy(other).float(), index


def test_two_fields_that_are_scaled_in_the_collation_never_share_memory():
    loader = DataLoader(Pairs(), 4, num_workers=1, collate_fn=halves_and_quarters)
    loader.collate_fn = PackingCollate(loader.collate_fn)

    for halves, quarters, numbers in loader:
        wanted = numbers.float()[:, None, None, None].expand(4, 3, 40, 50)
        assert torch.equal(halves, wanted / 2)
        assert torch.equal(quarters, (wanted + 100) / 4)
    assert loader.collate_fn.trouble == ""


def test_the_blocks_of_ended_workers_are_forgotten_by_several_threads_at_once(monkeypatch):
    class Changing(dict):
        def __iter__(self):
            keys = list(super().__iter__())
            self.clear()  # another loader's thread was here
            return iter(keys)

    monkeypatch.setattr(ring, "_THEIRS", Changing({(0, 1): None, (0, 2): None}))
    monkeypatch.setattr(ring, "_is_alive", lambda _pid: False)

    _memory, _, held = in_use()

    assert held.shared is not None


def test_two_threads_of_a_worker_never_get_the_same_block(monkeypatch):
    monkeypatch.setattr(ring, "_OURS", [])
    ring.borrow(5000)
    both, plain = threading.Barrier(2), ring.RingBlock.is_free.fget

    def is_free(block):
        found = plain(block)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # let the other thread look, too, before this one takes the block
        return found

    monkeypatch.setattr(ring.RingBlock, "is_free", property(is_free))
    with ThreadPoolExecutor(2) as pool:
        (one, _), (other, _) = pool.map(ring.borrow, [5000, 5000])

    assert one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_a_worker_never_writes_where_a_copy_is_under_way(runtime, copies, options):
    loader = plain_loader(workers=1, **options)
    loader.collate_fn.device, pictures = CUDA, loader.dataset.pictures
    runtime.is_done = False

    found = list(loader)
    are_right = [shows(view, numbers, pictures) for view, numbers in found]
    runtime.is_done = True
    again = [[shows(view, numbers, pictures) for view, numbers in loader] for _ in range(2)]

    assert are_right == [True] * 12
    assert again == [[True] * 12] * 2
    assert len({view.data_ptr() for view, _ in found}) == 12


@pytest.mark.parametrize("end", [list, next])
def test_blocks_are_unlocked_when_their_workers_have_ended(runtime, copies, end):
    loader = plain_loader(workers=1)
    loader.collate_fn.device = CUDA
    iterator = iter(loader)

    end(iterator)
    assert runtime.locked or runtime.unlocked
    copies.clear()
    del iterator
    gc.collect()

    assert runtime.locked == {}
    assert ring._THEIRS == {}


def shows(view, numbers, pictures):
    """Return whether a block still holds the pictures of its batch."""
    wanted = [np.asarray(pictures[number]).transpose(2, 0, 1) for number in numbers.tolist()]
    return np.array_equal(view.numpy(), np.stack(wanted))
