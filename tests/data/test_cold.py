import resource

import numpy as np
import pytest

import flatout.data
from flatout.data import packed_store as cold
from flatout.data.packed_store import ASKED_BATCHES, ColdReads
from tests.data.packs import packed
from tests.data.page_cache import cached_pages, evict

pytestmark = pytest.mark.skipif(cold.THREAD is None, reason="faults of a thread are counted here")
COUNT, BATCH = 256, 8


class Faults:
    """Page faults as the kernel counts them, one a batch while reads are cold."""

    def __init__(self):
        self.ru_majflt = 0

    def getrusage(self, _who):
        return self


@pytest.fixture
def faults(monkeypatch):
    counted = Faults()
    monkeypatch.setattr(cold.resource, "getrusage", counted.getrusage)
    return counted


def batches_asked_for(count, reads, faults, *, faulting):
    asked = []
    for number in range(count):
        with reads.asked_for(number, asked.append):
            faults.ru_majflt += faulting
    return asked


def test_nothing_is_asked_for_while_reads_do_not_wait(faults):
    assert batches_asked_for(40, ColdReads(), faults, faulting=0) == []


def test_batches_are_asked_for_while_one_that_is_not_waits(faults):
    asked = batches_asked_for(2 * ASKED_BATCHES + 3, ColdReads(), faults, faulting=1)

    looked_at = [0, ASKED_BATCHES + 1, 2 * ASKED_BATCHES + 2]
    assert asked == [n for n in range(2 * ASKED_BATCHES + 3) if n not in looked_at]


def test_it_ends_with_the_first_batch_that_is_there_anyway(faults):
    reads = ColdReads()
    batches_asked_for(1, reads, faults, faulting=1)

    assert len(batches_asked_for(40, reads, faults, faulting=0)) == ASKED_BATCHES


def test_a_store_asks_for_its_records_only_when_they_are_cold(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).integers(0, 256, (COUNT, 70_000), dtype=np.uint8)
    np.savez(tmp_path / "rows.npz", x=rows)
    packed(tmp_path / "rows.npz", tmp_path / "a")
    asked = []
    monkeypatch.setattr(
        flatout.data.packed_store.PackedStore, "will_need", lambda _, p: asked.append(p)
    )

    def epoch():
        asked.clear()
        faults = resource.getrusage(cold.THREAD).ru_majflt
        data = flatout.data.open(tmp_path / "a")
        order = np.random.default_rng(1).permutation(COUNT).reshape(-1, BATCH)
        found = [data.__getitems__(batch.tolist()).batch()["x"].numpy() for batch in order]
        assert (np.concatenate(found) == rows[data.store.index["original"][order.ravel()]]).all()
        return len(asked), resource.getrusage(cold.THREAD).ru_majflt - faults

    asked_warm, faults_warm = epoch()  # written just now: none, unless the kernel took pages away
    assert asked_warm <= ASKED_BATCHES * faults_warm
    shard = tmp_path / "a" / "shard-00000.bin"
    evict(shard)
    if cached_pages(shard):
        pytest.skip("this file system keeps its pages")
    assert epoch()[0] >= ASKED_BATCHES
