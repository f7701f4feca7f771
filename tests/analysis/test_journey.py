from dataclasses import replace

import pytest

from flatout.agent.probes.journey import COLLATE, DECODE, H2D, H2D_BYTES, LOSS, PARTS, READ
from flatout.analysis.journey import journey_of
from flatout.analysis.steps import steps_of, window_of
from flatout.records.journey import TRAINING, WORKERS
from flatout.records.json_records import from_plain
from flatout.records.phase_clock import DATA_WAIT, NAMES, OTHER
from flatout.records.trial_result import TrialResult
from tests.techniques.facts import loader, profile

STEPS = 12
STEP_S = 0.1
SECONDS = [0.05, 0.02, 0.01, 0.01, 0.01, 0.0, 0.0]
PHASES = {"data_wait": 50.0, "forward": 20.0, "backward": 10.0, "optimizer": 10.0, "other": 10.0}


def segment(number):
    counts = {"evals": 0, "loader_starts": 0, "batches": 1, "samples": 4}
    counts |= {"backwards": 1, "losses": [1.0]}
    return {"who": 0, "seconds": SECONDS, "end": 10 + (number + 1) * STEP_S, **counts}


def result(parts=(), *, host_s=None, **seen):
    """Return what a training process of twelve equal steps wrote; parts by number and phase."""
    segments = [segment(number) for number in range(STEPS)]
    sparse = {str(part * len(NAMES) + phase): value for (part, phase), value in dict(parts).items()}
    rows = [{"end": x["end"], "host_s": host_s, "parts": sparse} for x in segments]
    known = {"parts": PARTS, "rows": rows, "processes": [], "own": [], "missing": {}}
    known |= {"times_copies": True}
    return from_plain(TrialResult, {"segments": segments, "probes": {"journey": known | seen}})


def journey(written, **changes):
    known = profile(phases_ms=PHASES, loaders=(loader(),), samples_per_step=4.0)
    steps = window_of(steps_of(written.segments))
    return journey_of(written, steps, replace(known, **changes))


def training_ms(found):
    return {leg.name: leg.ms for leg in found.legs if leg.where == TRAINING}


def record(at_s, *, number=0, batches=0.0, io=(0.0, 0.0), anonymous=0.0, pss=100.0):
    """Return a worker's record: a batch takes 20 ms of reading, 10 of decoding, 10 of collate."""
    made = (0.02 * batches, 0.01 * batches, 0.01 * batches, batches)
    used = (0.2 * (at_s - 10), 0.1 * (at_s - 10), 30 * (at_s - 10), 10 * (at_s - 10))
    return [at_s, number, *made, *used, *io, anonymous, pss]


def worker(number, records):
    return {"pid": 100 + number, "address": "main:1", "records": records}


def test_no_journey_was_followed():
    written = replace(result(), probes={})

    assert journey(written) is None


def test_legs_split_the_phases_and_add_up_to_the_step():
    parts = {(READ, DATA_WAIT): 0.02, (DECODE, DATA_WAIT): 0.015, (COLLATE, DATA_WAIT): 0.01}
    parts |= {(H2D, OTHER): 0.004, (H2D_BYTES, OTHER): 1000.0, (LOSS, OTHER): 0.003}

    found = journey(result(parts))

    assert training_ms(found) == pytest.approx(
        {"read": 20.0, "decode": 15.0, "collate": 10.0, "sampler": 5.0, "h2d": 4.0}
        | {"forward": 20.0, "loss": 3.0, "backward": 10.0, "optimizer": 10.0, "other": 3.0}
    )
    copied = next(leg for leg in found.legs if leg.name == "h2d")
    assert (copied.bytes_per_step, copied.per_sample_ms) == (1000.0, pytest.approx(1.0))
    assert copied.bytes_per_s == pytest.approx(250_000.0)


def test_phases_of_the_devices_clock_are_split_as_the_host_saw_them():
    host_s = [0.1, 0.02, 0.01, 0.01, 0.01, 0.0, 0.0]

    found = journey(result({(READ, DATA_WAIT): 0.05}, host_s=host_s))

    assert training_ms(found)["read"] == pytest.approx(25.0)


def test_copies_that_the_device_traced_are_not_taken_twice():
    phases = PHASES | {"h2d": 6.0, "other": 4.0}

    found = journey(result({(H2D, OTHER): 0.008}), phases_ms=phases)

    assert training_ms(found)["h2d"] == 6.0
    assert training_ms(found)["other"] == pytest.approx(4.0)


def test_workers_are_shown_by_step_and_by_sample():
    ends = [10.2, 10.4, 10.6, 10.8, 11.0]
    records = [record(at, batches=5.0 * i) for i, at in enumerate(ends)]
    others = [record(at, number=1, batches=5.0 * i) for i, at in enumerate(ends)]

    written = result(processes=[worker(0, records), worker(1, others)])
    found = journey(written, loaders=(loader(num_workers=2),))

    theirs = {leg.name: leg for leg in found.legs if leg.where == WORKERS}
    assert {name: leg.ms for name, leg in theirs.items()} == pytest.approx(
        {"read": 20.0, "decode": 10.0, "collate": 10.0}
    )
    assert theirs["read"].share == pytest.approx(0.1)
    assert theirs["read"].per_sample_ms == pytest.approx(5.0)
    assert [facts.number for facts in found.workers] == [0, 1]
    assert found.workers[0].busy_share == pytest.approx(20 * 0.04 / 0.8)
    assert found.workers[0].user_share == pytest.approx(0.2)
    assert found.workers[0].involuntary_switches_per_s == pytest.approx(10.0)
    assert "queue" in training_ms(found)


def test_a_worker_that_is_started_anew_each_epoch_is_one_worker():
    first = [record(10.2, batches=0.0), record(10.5, batches=6.0)]
    second = [record(10.6, batches=0.0), record(11.0, batches=8.0)]

    found = journey(result(processes=[worker(0, first), worker(0, second)]))

    assert [facts.number for facts in found.workers] == [0]
    assert found.workers[0].busy_share == pytest.approx(14 * 0.04 / 0.7)


def test_what_the_kernel_refuses_is_missing_with_the_reason():
    refused = [record(at, batches=at, io=(-13.0, -13.0), pss=-2.0) for at in (10.2, 10.6, 11.0)]

    found = journey(result(processes=[worker(0, refused)]))

    assert found.missing["bytes read"] == (
        "/proc/PID/io may not be read here: EACCES, Permission denied"
    )
    assert "ENOENT" in found.missing["memory of the workers"]
    assert found.workers[0].read_bytes_per_step is None
    assert found.workers[0].pss_bytes is None
    assert found.workers[0].growth_bytes_per_step is None


def test_growth_is_told_from_readings_at_least_a_second_apart():
    ends = (10.2, 10.4, 10.9, 11.15)
    grown = [record(at, batches=at, pss=1e6 * at) for at in ends]
    slow = [[*values[:-1], 1e6 * values[0]] for values in grown]

    short = journey(result(processes=[worker(0, slow)]))

    assert short.workers[0].growth_bytes_per_step is None


def growth(sizes_mb):
    """Return the growth of a worker whose memory was read every 0.4 s."""
    spread = [10.5 + 0.4 * place for place in range(len(sizes_mb))]
    records = [
        record(at, batches=at, pss=1e6 * size) for at, size in zip(spread, sizes_mb, strict=True)
    ]
    long = from_plain(TrialResult, {"segments": [segment(number) for number in range(40)]})
    written = replace(result(processes=[worker(0, records)]), segments=long.segments)
    return journey(written).workers[0].growth_bytes_per_step


def test_growth_is_told_by_anonymous_memory_where_the_other_was_read_too_seldom():
    grown = [record(10 + at / 10, batches=at, anonymous=1e6 * at) for at in range(1, 20)]

    found = journey(result(processes=[worker(0, grown)])).workers[0]

    assert found.growth_bytes_per_step == pytest.approx(1e6)
    assert found.pss_bytes == 100


def test_growth_is_the_slope_of_all_readings():
    assert growth([100, 104, 108, 90, 116, 120, 124, 128]) == pytest.approx(1e6)


@pytest.mark.parametrize(
    ("sizes_mb", "expected"),
    [([100, 130, 101, 131, 102, 130, 101, 132], 0.0), ([100, 110, 120, 130, 140], None)],
    ids=["sawtooth of batches in the making", "too few readings"],
)
def test_memory_that_goes_up_and_down_or_was_hardly_read_does_not_grow(sizes_mb, expected):
    assert growth(sizes_mb) == expected


def test_on_the_cpu_nothing_is_copied_and_the_journey_says_so():
    found = journey(result(times_copies=False))

    assert found.missing == {"h2d, sync": "the model is on the CPU: nothing is copied to a device"}
