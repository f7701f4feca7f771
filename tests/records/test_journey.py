import json
import math
from dataclasses import replace

import pytest

from flatout.records.journey import WorkerPace, WorkerScan
from flatout.records.json_records import from_plain, to_plain


def scan(now=0, epoch_batches=None, **paces):
    """Return a scan of `w0=(batch_ms, start_ms)` and so on."""
    return WorkerScan(
        now=now,
        epoch_batches=epoch_batches,
        paces=tuple(
            WorkerPace(
                num_workers=int(name[1:]),
                prefetch_factor=2,
                batch_ms=(batch_ms,),
                start_ms=start_ms,
            )
            for name, (batch_ms, start_ms) in paces.items()
        ),
    )


def test_of_numbers_that_are_as_good_the_fewest_workers_are_best():
    found = scan(w0=(100.0, 0.0), w2=(51.0, 100.0), w4=(50.0, 200.0))

    assert found.best.num_workers == 2
    assert found.ratio(4, than=0) == pytest.approx(2.0)


def test_the_start_of_the_workers_counts_for_every_epoch():
    paces = {"w0": (100.0, 100.0), "w2": (60.0, 160.0), "w8": (50.0, 850.0)}

    assert scan(**paces).best.num_workers == 8
    assert scan(epoch_batches=1000, **paces).best.num_workers == 8
    assert scan(epoch_batches=20, **paces).best.num_workers == 2


def test_a_number_that_was_not_visited_has_no_ratio():
    assert math.isnan(scan(w0=(100.0, 0.0)).ratio(3, than=0))


def test_json_brings_it_back():
    found = scan(now=2, epoch_batches=7, w2=(50.0, 1.0), w4=(40.0, 1.0))
    found = replace(found, with_threads=(replace(found.paces[0], threads=1),))

    assert from_plain(WorkerScan, json.loads(json.dumps(to_plain(found)))) == found
