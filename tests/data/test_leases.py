import gc
import threading

import torch

from flatout.data.reader import MAX_KEPT, Leases


def test_memory_comes_back_with_the_last_view_and_not_before():
    leases = Leases()
    tensor = leases.take((4, 8), torch.float32)
    view = tensor.fill_(3)[1:].permute(1, 0)
    at = tensor.data_ptr()

    del tensor
    assert len(leases._free) == 0
    other = leases.take((4, 8), torch.float32).fill_(0)
    assert other.data_ptr() != at
    assert bool((view == 3).all())
    del view
    gc.collect()

    assert len(leases._free) == 1
    assert leases.take((4, 8), torch.float32).data_ptr() == at


def test_an_array_of_the_tensor_keeps_its_memory():
    leases = Leases()
    array = leases.take((3,), torch.int64).fill_(5).numpy()

    assert len(leases._free) == 0
    assert array.tolist() == [5, 5, 5]


def test_much_larger_blocks_are_not_taken_and_few_are_kept():
    leases = Leases()
    big = [leases.take((1000,), torch.float32) for _ in range(MAX_KEPT + 3)]
    del big

    small = leases.take((10,), torch.float32)

    assert len(leases._free) == MAX_KEPT
    assert small.untyped_storage().nbytes() < 1000
    assert leases.take((0, 3), torch.uint8).shape == (0, 3)


def test_threads_never_hold_the_same_block():
    leases, wrong = Leases(), []

    def work(number):
        for _ in range(200):
            tensor = leases.take((64,), torch.int64).fill_(number)
            if not bool((tensor == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
