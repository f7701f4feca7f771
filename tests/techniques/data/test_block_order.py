import itertools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

import flatout.data
from flatout.data.packed_store import evict, resident_share
from flatout.records.errors import NotApplicable
from flatout.records.journey import Journey, Leg, WorkerFacts
from flatout.techniques.data import block_order
from flatout.techniques.data.block_order import BlockOrder, block_sampler
from tests.data.packs import packed
from tests.paths import ROOT
from tests.techniques.facts import loader, machine, profile

PROMISE = "this module counts every sample of an epoch"

SAMPLES = 10_000
SCRIPT = ROOT / "tests/scripts/data_techniques/block_order_rank.py"


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Return a shuffled and a sorted store of 10,000 samples in 100 classes."""
    root = tmp_path_factory.mktemp("stores")
    numbers = np.arange(SAMPLES)
    np.savez(root / "sorted.npz", x=numbers, label=numbers // 100)
    packed(root / "sorted.npz", root / "shuffled")
    packed(root / "sorted.npz", root / "sorted", is_shuffled=False)
    return root


@pytest.fixture
def cold(monkeypatch):
    """Let every store be cold: whether pages are in memory is not up to a test."""
    monkeypatch.setattr("flatout.data.packed_store.resident_share", lambda _paths: 0.0)


def asked(data, **changes):
    return {"dataset": data, "batch_size": 50, "shuffle": True, "sampler": None} | changes


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("order", ["stored", "source"])
def test_every_sample_comes_once_an_epoch_and_epochs_differ(stores, order):
    data = flatout.data.open(stores / "shuffled", order=order)
    built = DataLoader(**BlockOrder().loader(asked(data)))

    epochs = [torch.cat([batch["x"] for batch in built]).tolist() for _ in range(2)]

    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(SAMPLES))
    assert epochs[0] != epochs[1]


@pytest.mark.usefixtures("cold")
def test_blocks_of_the_store_come_in_the_same_window(stores):
    data = flatout.data.open(stores / "shuffled")
    places = np.array(list(block_sampler(data)))

    window = np.unique(places[:4096])

    # 256 whole blocks of 16 neighbours, the store's last and shorter one aside.
    whole = np.isin(window // 16, np.flatnonzero(np.bincount(window // 16) == 16))
    assert whole.mean() > 0.99


@pytest.fixture
def agreed(monkeypatch):
    """Let the ranks agree without a process group: each of them is asked in this process."""
    monkeypatch.setattr("flatout.data.proof.agreement.agree", lambda *_words, ranks: None)


@pytest.mark.usefixtures("cold", "agreed")
def test_ranks_share_an_epoch(stores):
    data = flatout.data.open(stores / "shuffled")
    samplers = [DistributedSampler(data, 4, rank, shuffle=True, seed=5) for rank in range(4)]

    parts = [list(BlockOrder().loader(asked(data, sampler=one))["sampler"]) for one in samplers]

    assert {len(part) for part in parts} == {SAMPLES // 4}
    assert sorted(itertools.chain(*parts)) == list(range(SAMPLES))


def both_ranks(tmp_path, shares, folders):
    """Return what two ranks drew, on hosts that hold such shares of such stores in memory."""
    outs = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), tmp_path / "meeting", folder, str(share), out]
        )
        for rank, (share, folder, out) in enumerate(zip(shares, folders, outs, strict=True))
    ]
    assert [process.wait(timeout=240) for process in ranks] == [0, 0]
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(0.9, 0.0), (0.0, 0.9)])
def test_a_rank_that_refuses_is_followed_by_the_others(stores, tmp_path, shares):
    found = both_ranks(tmp_path, shares, [stores / "shuffled"] * 2)

    # Each sample once: had one rank changed its order, many would come twice or never.
    assert sorted(found[0]["drawn"] + found[1]["drawn"]) == list(range(SAMPLES))
    refusals = {rank["refusal"] for rank in found}
    assert refusals == {
        f"rank {shares.index(0.9)}: 90% of the store is in memory: random reads cost no more than "
        "those in blocks"
    }


@pytest.mark.slow
def test_ranks_that_can_all_read_in_blocks_do_so(stores, tmp_path):
    found = both_ranks(tmp_path, (0.0, 0.0), [stores / "shuffled"] * 2)

    assert [rank["refusal"] for rank in found] == ["", ""]
    assert sorted(found[0]["drawn"] + found[1]["drawn"]) == list(range(SAMPLES))


@pytest.mark.slow
def test_hosts_whose_stores_were_shuffled_differently_are_left_alone(stores, tmp_path):
    np.savez(tmp_path / "again.npz", x=np.arange(SAMPLES), label=np.arange(SAMPLES) // 100)
    packed(tmp_path / "again.npz", tmp_path / "again", seed=1)

    found = both_ranks(tmp_path, (0.0, 0.0), [stores / "shuffled", tmp_path / "again"])

    assert {rank["refusal"] for rank in found} == {"rank 1 has other data than rank 0"}


@pytest.mark.usefixtures("cold")
def test_ranks_that_cannot_agree_are_left_alone(stores):
    data = flatout.data.open(stores / "shuffled")
    own = DistributedSampler(data, 2, 1, shuffle=True, seed=5)

    with pytest.raises(NotApplicable, match="2 ranks have no process group"):
        BlockOrder().loader(asked(data, sampler=own))
    with pytest.raises(NotApplicable, match="2 ranks have no process group"):
        block_sampler(data, ranks=(1, 2))


def of_rank_one(data):
    """Return the script's own sampler, and the one that the technique puts in its place."""
    own = DistributedSampler(data, 2, 1, shuffle=True, seed=5)
    return own, BlockOrder().loader(asked(data, sampler=own))["sampler"]


@pytest.mark.usefixtures("cold", "agreed")
def test_a_resumed_run_goes_on_with_the_order_of_its_epoch(stores):
    data = flatout.data.open(stores / "shuffled")
    _, whole = of_rank_one(data)
    epochs = [list(whole) for _ in range(5)]
    own, resumed = of_rank_one(data)

    own.set_epoch(3)
    third, fourth = list(resumed), list(resumed)

    assert (third, fourth) == (epochs[3], epochs[4])
    assert {slot.epoch for slot in third} == {3}


@pytest.mark.usefixtures("cold", "agreed")
def test_a_script_that_says_every_epoch_has_the_order_of_each(stores):
    data = flatout.data.open(stores / "shuffled")
    own, sampler = of_rank_one(data)

    epochs = []
    for epoch in range(3):
        own.set_epoch(epoch)
        epochs.append({slot.epoch for slot in sampler})

    assert epochs == [{0}, {1}, {2}]


@pytest.mark.usefixtures("cold", "agreed")
def test_epochs_go_on_by_themselves_where_the_script_says_none(stores):
    _, sampler = of_rank_one(flatout.data.open(stores / "shuffled"))

    first, second = list(sampler), list(sampler)

    assert first != second
    assert [first[0].epoch, second[0].epoch] == [0, 1]


@pytest.mark.usefixtures("cold", "agreed")
def test_a_rank_that_looks_at_one_batch_stays_in_step_with_the_others(stores):
    _, sampler = of_rank_one(flatout.data.open(stores / "shuffled"))

    looked = next(iter(sampler))

    assert next(iter(sampler)) == looked


@pytest.mark.usefixtures("cold")
def test_a_shuffle_that_is_left_early_is_another_one_next_time(stores):
    sampler = BlockOrder().loader(asked(flatout.data.open(stores / "shuffled")))["sampler"]

    begun = [list(itertools.islice(sampler, 50)) for _ in range(2)]

    assert begun[0] != begun[1]


def first_slots(data, **changes):
    """Return what a loader that is made for one epoch draws at its beginning."""
    wanted = BlockOrder().loader(asked(data, **changes))
    return list(itertools.islice(wanted["sampler"], 50))


@pytest.mark.usefixtures("cold")
def test_each_loader_of_a_script_that_makes_one_an_epoch_has_another_order(stores):
    data = flatout.data.open(stores / "shuffled")

    first, second = first_slots(data), first_slots(data)

    assert first != second
    assert first[0].epoch != second[0].epoch  # so augmentation is another one too


@pytest.mark.usefixtures("cold")
def test_the_same_seed_gives_the_same_orders(stores):
    data, epochs = flatout.data.open(stores / "shuffled"), []

    for _ in range(2):
        torch.manual_seed(7)
        epochs.append([first_slots(data), first_slots(data)])

    assert epochs[0] == epochs[1]


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(
    "given",
    [
        lambda own: {"generator": own},
        lambda own: {"sampler": RandomSampler(range(SAMPLES), generator=own)},
    ],
)
def test_a_generator_of_the_script_is_what_is_drawn_from(stores, given):
    data, epochs = flatout.data.open(stores / "shuffled"), []

    for seed in (7, 7, 8):
        own = torch.Generator().manual_seed(seed)
        epochs.append(first_slots(data, **given(own)))

    assert epochs[0] == epochs[1] != epochs[2]


@pytest.mark.usefixtures("cold")
def test_the_stream_of_the_script_moves_as_it_did(stores):
    data, after = flatout.data.open(stores / "shuffled"), []

    for wanted in (asked(data), BlockOrder().loader(asked(data))):
        torch.manual_seed(7)
        next(iter(DataLoader(**wanted)))
        after.append(torch.get_rng_state())

    assert torch.equal(after[0], after[1])


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("sampler", [None, RandomSampler(range(SAMPLES))])
def test_ranks_that_each_draw_their_own_shuffle_are_left_alone(stores, monkeypatch, sampler):
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(NotApplicable, match="2 ranks shuffle without a DistributedSampler"):
        BlockOrder().loader(asked(flatout.data.open(stores / "shuffled"), sampler=sampler))


@pytest.mark.usefixtures("cold")
def test_ranks_of_a_process_group_are_known_without_a_launcher(stores):
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(NotApplicable, match="2 ranks shuffle"):
            BlockOrder().loader(asked(flatout.data.open(stores / "shuffled")))
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("cold")
def test_a_launcher_of_one_rank_changes_nothing(stores, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")

    wanted = BlockOrder().loader(asked(flatout.data.open(stores / "shuffled")))

    assert len(wanted["sampler"]) == SAMPLES


@pytest.mark.usefixtures("cold")
def test_a_class_sorted_store_is_refused(stores):
    with pytest.raises(NotApplicable, match="blocks of it are of few classes"):
        BlockOrder().loader(asked(flatout.data.open(stores / "sorted")))


@pytest.mark.usefixtures("cold")
def test_a_store_that_claims_to_be_shuffled_is_judged_by_its_labels(stores):
    data = flatout.data.open(stores / "sorted")
    data.store.header = replace(data.store.header, order="shuffled")

    with pytest.raises(NotApplicable, match="times as unevenly as by a uniform shuffle"):
        block_sampler(data)


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(
    "changes",
    [
        {"shuffle": False},
        {"sampler": SequentialSampler(range(SAMPLES)), "shuffle": False},
        {"sampler": RandomSampler(range(SAMPLES), replacement=True), "shuffle": False},
        {"sampler": RandomSampler(range(SAMPLES), num_samples=9), "shuffle": False},
    ],
)
def test_a_loader_that_does_not_shuffle_all_samples_is_left_alone(stores, changes):
    with pytest.raises(NotApplicable, match="does not shuffle"):
        BlockOrder().loader(asked(flatout.data.open(stores / "shuffled"), **changes))


@pytest.mark.usefixtures("cold")
def test_other_data_sets_and_small_ones_are_left_alone(tmp_path):
    np.save(tmp_path / "few.npy", np.arange(100))
    packed(tmp_path / "few.npy", tmp_path / "few")

    with pytest.raises(NotApplicable, match="from a packed store"):
        BlockOrder().loader(asked(list(range(SAMPLES))))
    with pytest.raises(NotApplicable, match="less than two windows"):
        BlockOrder().loader(asked(flatout.data.open(tmp_path / "few")))


def test_a_store_in_memory_is_refused_and_an_evicted_one_is_not(stores):
    data = flatout.data.open(stores / "shuffled")
    paths = [data.store.folder / shard.name for shard in data.store.header.shards]
    sum(path.read_bytes()[0] for path in paths)
    with pytest.raises(NotApplicable, match="is in memory"):
        block_sampler(data)

    for path in paths:
        evict(path)
    if resident_share(paths):
        pytest.skip("this file system does not let go of its pages")

    assert len(block_sampler(data)) == SAMPLES


@pytest.mark.usefixtures("cold")
def test_windows_that_memory_does_not_hold_are_refused(stores, monkeypatch):
    monkeypatch.setattr(block_order, "host_memory_bytes", lambda: 100_000)

    with pytest.raises(NotApplicable, match=r"two windows of 4096 samples"):
        block_sampler(flatout.data.open(stores / "shuffled"))


def journey(read_ms, from_storage):
    legs = (("read", read_ms), ("decode", 100.0), ("collate", 10.0))
    return Journey(
        legs=tuple(Leg(name=name, where="workers", ms=ms, share=0.1) for name, ms in legs),
        workers=(
            WorkerFacts(
                number=0,
                busy_share=1.0,
                user_share=0.5,
                system_share=0.1,
                voluntary_switches_per_s=1.0,
                involuntary_switches_per_s=1.0,
                storage_bytes_per_step=from_storage,
            ),
        ),
    )


@pytest.mark.parametrize(
    ("read_ms", "from_storage", "offered"), [(100.0, 1e6, 1), (100.0, 0.0, 0), (5.0, 1e6, 0)]
)
def test_it_is_offered_where_cold_reads_are_the_measured_limit(read_ms, from_storage, offered):
    facts = profile(phases_ms={"data_wait": 200.0}, loaders=(loader(),))
    facts = replace(facts, journey=journey(read_ms, from_storage))

    found = BlockOrder.candidates(facts, machine())

    assert len(found) == offered
    assert all(item.predict(facts, machine()).step_ms < 0 for item in found)


def test_it_is_not_offered_where_reads_were_not_measured():
    facts = profile(phases_ms={"data_wait": 200.0}, loaders=(loader(),))

    assert BlockOrder.candidates(facts, machine()) == ()


@pytest.mark.parametrize("settings", [{"block": 4}, {"window": 1024}, {"window": 4100}])
def test_settings_that_mix_badly_are_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        BlockOrder(**settings)
