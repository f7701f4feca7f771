"""The peers' suite: what it claims from made-up results, and the job on real photographs."""

from random import Random

import numpy as np
import pytest
import torch

from benchmarks.peers import job
from benchmarks.suites import loader_peers


def measured(per_s):
    return [{"images": per_s, "wall_s": 1.0, "cpu_s": 2.0, "first_s": 0.5, "pss_bytes": 2**20}] * 3


@pytest.mark.parametrize(
    ("jpeg", "raw", "holds"), [(700, 900, True), (500, 900, False), (700, 300, False)]
)
def test_it_holds_when_no_other_loader_of_either_class_is_faster(jpeg, raw, holds):
    results = {
        "torch DataLoader": measured(300),
        "FFCV": measured(600),
        "FFCV raw 256": measured(800),
        "flatout, packed JPEG": measured(jpeg),
        "flatout, packed raw 256": measured(raw),
    }

    record = loader_peers.record_of(results, {"Grain": "No module named 'grain'"})

    told = {note for note in record.notes if note.startswith("missed: ahead")}
    assert (not told) is holds
    assert "Grain was left out: No module named 'grain'" in record.notes
    assert [row[0] for row in record.table[1:]] == list(results)


def test_every_aim_is_judged_by_its_own_rows():
    results = {
        "torch DataLoader": measured(100),
        "flatout, packed JPEG": measured(250),
        "flatout, packed raw 256": measured(1200),
        "flatout, packed raw 256, bytes": measured(900),
        "flatout, kept pixels": measured(6000),
        "flatout, kept pixels, bytes": measured(4000),
        "decoding alone": measured(280),
    }

    notes = loader_peers.record_of(results, {}).notes

    assert "met: flatout, packed raw 256, rate / torch DataLoader: 12.00, aim 10 or more" in notes
    assert (
        "missed: flatout, packed raw 256, bytes, rate / torch DataLoader: 9.00, aim 10 or more"
        in notes
    )
    assert "met: flatout, kept pixels, rate / torch DataLoader: 60.00, aim 50 or more" in notes
    assert "met: flatout, packed JPEG, rate / decoding alone: 0.89, aim 0.85 or more" in notes
    assert "met: flatout, packed JPEG, memory / torch DataLoader: 1.00, aim 1.2 or less" in notes
    assert loader_peers.record_of(results, {}).holds is False
    assert loader_peers.record_of({**results, "FFCV raw 256": measured(1300)}, {}).holds is False


def test_rows_that_do_less_stand_for_no_class():
    results = {
        "FFCV raw 256": measured(800),
        "flatout, packed raw 256": measured(700),
        "flatout, packed raw 256, bytes": measured(2000),
    }

    assert not loader_peers.leads(results, is_raw=True)


def test_a_crop_lies_in_the_picture_whatever_its_shape():
    random = Random(0)

    boxes = [(job.crop_box(random, w, h), w, h) for w in (1, 40, 500) for h in (1, 90, 375)]

    assert all(
        x >= 0 and y >= 0 and x + bw <= w and y + bh <= h and bw and bh
        for (x, y, bw, bh), w, h in boxes
    )


def test_normalising_a_batch_is_normalising_its_samples():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)

    together = job.normalised_batch(torch.from_numpy(pixels))

    apart = torch.stack([job.normalised(one) for one in pixels])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
