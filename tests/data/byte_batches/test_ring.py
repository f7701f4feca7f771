"""The ring's blocks are never written to while anyone reads them."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.data.byte_batches import ring
from flatout.data.byte_batches.packed import Packed, restored, shared_bytes
from flatout.data.byte_batches.transport import PackingCollate


def in_use(count=5000, number=0):
    """Return bytes of a worker's block as the training process gets them, and the block."""
    memory = ring.new_shared(ring.room_for(count + 1))
    memory[-1] = ring.BUSY
    values, held = ring.receive(os.getpid(), number, memory, count)
    return memory, values, held


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
