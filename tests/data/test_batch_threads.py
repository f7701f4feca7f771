import threading
import time

import pytest
import torch

import flatout.data
from flatout.data.format import Encoding
from flatout.data.reader import single_threads
from flatout.records.errors import UserError
from tests.data.packs import image_folder, packed

COUNT = 30
CROPS = flatout.data.Crops(side=24)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("threads")
    packed(image_folder(root / "photos", COUNT), root / "raw", encoding=Encoding(kind="raw"))
    return root / "raw"


class Slow:
    """Makes even batches slowly and fails on request."""

    def __init__(self, failing=()):
        self.failing = failing
        self.made = []

    def __getitems__(self, indices):
        if indices[0] in self.failing:
            raise ValueError(f"sample {indices[0]} is damaged")
        time.sleep(0.02 * (indices[0] % 2))
        self.made.append(indices[0])
        return [torch.tensor(index) for index in indices]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", [None, 4])
def test_batches_and_their_order_do_not_depend_on_threads(store, threads, seed):
    data = flatout.data.cropped(flatout.data.open(store), CROPS, seed=seed)
    loader = flatout.data.BatchThreads(
        data, flatout.data.GlobalOrder(COUNT, 4, flatout.data.OrderOptions(seed=1)), threads=threads
    )

    torch.manual_seed(0)
    found = [batch for _ in range(2) for batch in loader]

    torch.manual_seed(0)
    order = flatout.data.GlobalOrder(COUNT, 4, flatout.data.OrderOptions(seed=1))
    slots = [batch for _ in range(2) for batch in order]
    expected = [flatout.data.collate(data.__getitems__(batch)) for batch in slots]
    assert len(loader) == 8
    for (images, labels), (wanted, wanted_labels) in zip(found, expected, strict=True):
        assert torch.equal(images, wanted)
        assert torch.equal(labels, wanted_labels)
    for epoch in (slots[:8], slots[8:]):
        assert sorted(slot for batch in epoch for slot in batch) == list(range(COUNT))


def test_a_quick_batch_does_not_overtake_a_slow_one():
    loader = flatout.data.BatchThreads(Slow(), [[n, n + 100] for n in range(9)], threads=3)

    assert [batch[0].item() for batch in loader] == list(range(9))


def test_what_goes_wrong_in_a_thread_is_raised_in_the_loop_and_no_thread_is_left():
    before = threading.active_count()
    loader = flatout.data.BatchThreads(Slow(failing=[2]), [[n] for n in range(6)], threads=2)

    batches = iter(loader)
    assert [next(batches).item() for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="sample 2 is damaged"):
        next(batches)

    assert threading.active_count() == before


def test_a_loop_that_breaks_off_ends_the_threads():
    before = threading.active_count()
    data = Slow()
    batches = iter(flatout.data.BatchThreads(data, [[n] for n in range(100)], threads=2))

    next(batches)
    batches.close()

    assert threading.active_count() == before
    assert len(data.made) <= 4


def test_operations_in_the_threads_use_no_threads_and_others_keep_theirs():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with single_threads(2) as pool:
            inside = [
                future.result() for future in [pool.submit(_threads_after_work) for _ in range(8)]
            ]
        found = []
        later = threading.Thread(target=lambda: found.append(_threads_after_work()))
        later.start()
        later.join()

        assert set(inside) == {1}
        assert [torch.get_num_threads(), *found] == [3, 3]
    finally:
        torch.set_num_threads(before)


def _threads_after_work():
    torch.ones(200_000).add_(1)
    return torch.get_num_threads()


def test_a_data_set_of_single_samples_is_sent_to_torch_s_loader():
    with pytest.raises(UserError, match="DataLoader, whose workers are processes"):
        flatout.data.BatchThreads([1, 2], [[0]])
