import multiprocessing
import random
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from flatout.agent import worker_start
from flatout.agent.worker_start import start_method
from flatout.records.errors import NotApplicable
from flatout.records.journey import Journey, WorkerPace, WorkerScan
from flatout.records.readings import RankFacts
from flatout.techniques.data.loader_workers import LoaderWorkers
from tests.rules.journey_facts import leg, worker
from tests.techniques.data.samples import (
    CountsEpochs,
    Numbers,
    OwnGenerators,
    ShufflesInPlace,
    Stream,
)
from tests.techniques.facts import GIB, loader, machine, profile

PROMISE = ("pictures.py", {"num_workers": 1})


def starved(wait_ms=300.0, **changes):
    return profile(phases_ms={"data_wait": wait_ms}, loaders=(loader(),), **changes)


def workers_of(candidates):
    return [candidate.num_workers for candidate in candidates]


def two_epochs(arguments):
    """Return all batches and where the trainer's random stream stands after each epoch."""
    torch.manual_seed(0)
    built = DataLoader(**arguments)
    seen = []
    for _ in range(2):
        seen += [batch.tolist() for batch in built]
        seen.append(torch.rand(1).item())
    return seen


@pytest.mark.parametrize("workers", [1, 2])
def test_samples_and_random_stream_are_those_of_the_loader_without_workers(workers):
    asked = {"dataset": Numbers(), "batch_size": 5, "shuffle": True}
    technique = LoaderWorkers(num_workers=workers)

    assert two_epochs(technique.loader(asked)) == two_epochs(asked)


def test_two_cores_are_offered_two_workers_and_one():
    assert workers_of(LoaderWorkers.candidates(starved(), machine(usable_cores=2))) == [2, 1]


def test_many_cores_are_offered_what_the_step_needs_twice_that_and_all():
    found = LoaderWorkers.candidates(starved(wait_ms=250.0), machine(usable_cores=16))

    assert workers_of(found) == [3, 6, 16]


def test_the_present_number_is_not_offered_again():
    facts = profile(phases_ms={"data_wait": 50.0}, loaders=(loader(effective_workers=2),))

    found = LoaderWorkers.candidates(facts, machine(usable_cores=2))

    assert workers_of(found) == [1]


@pytest.mark.chaos
def test_a_small_shared_memory_lowers_the_prefetch_and_then_the_workers():
    big = loader(batch_bytes=10_000_000)
    waiting = profile(phases_ms={"data_wait": 300.0}, loaders=(big,))

    found = LoaderWorkers.candidates(waiting, machine(usable_cores=4, shm_free_bytes=40_000_000))

    assert [(c.num_workers, c.prefetch_factor) for c in found] == [(2, 1)]


def test_nothing_is_offered_without_a_wait_or_without_a_loader():
    assert LoaderWorkers.candidates(starved(wait_ms=1.0), machine()) == ()
    assert LoaderWorkers.candidates(profile(phases_ms={"data_wait": 50.0}), machine()) == ()


def test_an_iterable_data_set_is_offered_one_worker_at_most():
    waiting = profile(phases_ms={"data_wait": 300.0}, loaders=(loader(is_iterable=True),))

    assert workers_of(LoaderWorkers.candidates(waiting, machine())) == [1]


def test_workers_beside_a_gpu_hide_the_whole_wait():
    facts = starved(kind="cuda")

    effect = LoaderWorkers(num_workers=4).predict(facts, machine())

    assert effect.step_ms == pytest.approx(-300.0)


def test_workers_on_busy_cores_are_predicted_to_share_them():
    facts = starved(wait_ms=100.0, cpu_threads=2)

    effect = LoaderWorkers(num_workers=2).predict(facts, machine(usable_cores=2))

    assert -51 < effect.step_ms < -45


def test_an_iterable_data_set_is_left_with_the_workers_it_has():
    with pytest.raises(NotApplicable, match="every worker repeats it"):
        LoaderWorkers(num_workers=2).loader({"dataset": Stream(), "num_workers": 0})

    one = LoaderWorkers(num_workers=1).loader({"dataset": Stream(), "num_workers": 0})
    assert list(DataLoader(**one)) == [0, 1, 2, 3]


@pytest.mark.parametrize("data", [OwnGenerators(), CountsEpochs(), ShufflesInPlace()])
def test_a_set_that_goes_on_from_epoch_to_epoch_gets_no_workers(data):
    """A copy of it in a worker would begin again in each: the same draws, epoch after epoch."""
    with pytest.raises(NotApplicable, match="goes on from epoch to epoch"):
        LoaderWorkers(num_workers=1).loader({"dataset": data, "num_workers": 0})


def test_a_generator_that_no_sample_draws_from_is_no_reason_against_workers():
    data = Numbers()
    data.split_by = random.Random(0)

    assert LoaderWorkers(num_workers=1).loader({"dataset": data})["num_workers"] == 1
    own = {"dataset": OwnGenerators(), "num_workers": 2}
    assert LoaderWorkers(num_workers=3).loader(own)["num_workers"] == 3


def test_a_data_set_that_cannot_be_pickled_is_left_alone_under_spawn_only():
    technique = LoaderWorkers()
    local = Numbers()
    local.transform = lambda x: x
    asked = {"dataset": local, "num_workers": 0}

    with pytest.raises(NotApplicable, match="spawned here, and dataset: "):
        technique.loader(asked | {"multiprocessing_context": "spawn"})
    assert technique.loader(asked | {"multiprocessing_context": "fork"})["num_workers"] == 2


def test_a_start_in_another_way_than_usual_is_told_at_the_end(monkeypatch):
    technique = LoaderWorkers()
    monkeypatch.setattr(worker_start, "start_method", lambda: "spawn")
    plain, local = Numbers(), Numbers()
    local.transform = lambda x: x

    usual = technique.loader({"dataset": plain, "num_workers": 0})
    assert (usual.get("multiprocessing_context"), technique.end()) == (None, "")
    forked = [technique.loader({"dataset": local, "num_workers": 0}) for _ in range(2)]

    assert start_method(forked[0]["multiprocessing_context"]) == "fork"
    assert technique.end().count("flatout forks them instead of spawn: dataset: ") == 1


def test_the_start_method_is_read_without_settling_it():
    assert start_method("spawn") == "spawn"
    assert start_method(multiprocessing.get_context("forkserver")) == "forkserver"
    before = multiprocessing.get_start_method(allow_none=True)

    assert start_method() in multiprocessing.get_all_start_methods()
    assert multiprocessing.get_start_method(allow_none=True) == before


def followed(*, wait_ms=100.0, read_ms=0.0, decode_ms=190.0, workers=2, facts=(), **changes):
    """Return a profile with a journey; its step without data takes 100 ms."""
    seen = Journey(
        legs=(leg("read", read_ms), leg("decode", decode_ms), leg("collate", 10.0)),
        workers=tuple(worker(n, **dict(facts)) for n in range(workers)),
    )
    known = {"loaders": (loader(num_workers=workers),)} | changes
    return profile(phases_ms={"data_wait": wait_ms}, journey=seen, kind="cuda", **known)


BUSY = {"busy_share": 0.98, "user_share": 0.9, "system_share": 0.1}


def test_what_the_workers_were_measured_to_need_comes_first():
    found = LoaderWorkers.candidates(followed(facts=BUSY, workers=1), machine(usable_cores=16))

    # 190 ms of decoding and 10 of collating in a step that could take 100.
    assert workers_of(found)[:2] == [2, 4]


def test_workers_that_are_blocked_may_outnumber_the_cores():
    blocked = followed(read_ms=600.0, facts=BUSY, workers=4)

    assert max(workers_of(LoaderWorkers.candidates(blocked, machine(usable_cores=4)))) == 16


def test_the_neighbours_of_a_number_that_was_kept_are_tried():
    kept = followed(
        facts=BUSY, workers=8, loaders=(loader(num_workers=0, effective_workers=8),), wait_ms=30.0
    )

    assert workers_of(LoaderWorkers.candidates(kept, machine(usable_cores=16))) == [6, 10]


def test_ranks_on_a_host_share_its_cores():
    rank = RankFacts(rank=0, step_ms=200.0, phases_ms={}, samples_per_s=1.0)
    shared = followed(facts=BUSY, workers=1, ranks=(rank,) * 4)

    assert max(workers_of(LoaderWorkers.candidates(shared, machine(usable_cores=16)))) == 4


def test_workers_that_need_much_memory_are_fewer():
    large = followed(facts=BUSY | {"pss_bytes": 3 * GIB}, workers=1)

    found = LoaderWorkers.candidates(large, machine(usable_cores=16, memory_bytes=16 * GIB))

    assert max(workers_of(found)) == 2


def test_a_wait_beside_idle_workers_asks_for_more_batches_ahead():
    idle = followed(facts=BUSY | {"busy_share": 0.5}, workers=2)

    first = LoaderWorkers.candidates(idle, machine())[0]

    assert (first.num_workers, first.prefetch_factor) == (2, 4)
    assert first.predict(idle, machine()).step_ms == pytest.approx(-50.0)


def test_a_crowded_cpu_is_offered_fewer_workers():
    crowded = replace(
        followed(wait_ms=0.0, facts=BUSY | {"busy_share": 0.1}, workers=8),
        device_kind="cpu",
        delay_share=0.3,
    )

    found = LoaderWorkers.candidates(crowded, machine(usable_cores=8))

    assert max(workers_of(found)) < 8
    assert all(x.predict(crowded, machine(usable_cores=8)).step_ms < -10 for x in found)


def scanned(now=0, **batch_ms):
    """Return a profile whose training was seen with several numbers of workers."""
    paces = tuple(
        WorkerPace(num_workers=int(name[1:]), prefetch_factor=2, batch_ms=(ms,))
        for name, ms in batch_ms.items()
    )
    loaders = (loader(effective_workers=now),)
    facts = profile(phases_ms={"data_wait": 100.0}, loaders=loaders)
    return replace(facts, worker_scan=WorkerScan(now=0, paces=paces))


def test_the_best_number_that_was_seen_is_the_only_one_offered():
    facts = scanned(w0=200.0, w2=150.0, w8=100.0)

    (found,) = LoaderWorkers.candidates(facts, machine(usable_cores=2))

    assert found.num_workers == 8
    assert found.predict(facts, machine(usable_cores=2)).step_ms == pytest.approx(-100.0)


def test_nothing_is_offered_where_no_number_beats_the_present_one():
    level = replace(scanned(w0=100.0, w2=100.0), device_kind="cuda")
    assert LoaderWorkers.candidates(level, machine()) == []
    assert LoaderWorkers.candidates(scanned(now=8, w0=200.0, w8=100.0), machine()) == []


def test_on_the_cpu_a_scan_without_a_clear_gain_proves_nothing_against_workers():
    here = machine(usable_cores=2)
    expected = LoaderWorkers.candidates(replace(scanned(w0=1.0), worker_scan=None), here)
    slight, none = scanned(w0=110.0, w1=120.0, w8=100.0), scanned(w0=100.0, w1=120.0, w8=130.0)

    found = LoaderWorkers.candidates(slight, here)

    assert [x.num_workers for x in found] == [8, expected[0].num_workers]
    gains = [x.predict(slight, here).step_ms for x in found]
    assert gains[0] == pytest.approx(gains[1], rel=0.01)
    assert LoaderWorkers.candidates(none, here) == expected[:1]


def test_a_scan_that_left_cores_to_the_workers_proves_that_more_are_no_use():
    facts = scanned(w0=110.0, w1=120.0, w8=100.0)
    one_thread = WorkerPace(num_workers=2, prefetch_factor=2, batch_ms=(105.0,), threads=1)
    seen = replace(facts.worker_scan, with_threads=(one_thread,))

    found = LoaderWorkers.candidates(replace(facts, worker_scan=seen), machine(usable_cores=2))

    assert [x.num_workers for x in found] == [8]


def test_beside_a_gpu_a_slight_gain_tells_enough():
    facts = replace(scanned(w0=110.0, w1=120.0, w8=100.0), device_kind="cuda")

    assert [x.num_workers for x in LoaderWorkers.candidates(facts, machine())] == [8]
