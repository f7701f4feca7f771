from itertools import chain

import pytest
import torch
from PIL import Image
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from flatout.records.errors import NotApplicable
from flatout.records.messages import messages
from flatout.techniques.data.block_order import BlockOrder
from flatout.techniques.data.packed_data import PackedData
from tests.data.packs import image_folder, packed
from tests.data.photographs import Photographs, tensor_of
from tests.rules.journey_facts import MIB, leg, worker
from tests.techniques.data.samples import Numbers, Stream
from tests.techniques.facts import loader, machine, profile

PROMISE = "this module counts every sample of an epoch"


class Numbered(Photographs):
    """Pictures in folders, each with its number."""

    def __getitem__(self, index):
        return tensor_of(Image.open(self.paths[index]).convert("RGB")).float().mean(), index


@pytest.fixture
def pictures(tmp_path):
    return Numbered(sorted(image_folder(tmp_path / "images", 24).glob("*/*.jpeg")))


def asked(dataset, **more):
    return {"dataset": dataset, "batch_size": 4, "shuffle": True, **more}


def epochs(arguments, technique, count=2):
    torch.manual_seed(0)
    built = DataLoader(**technique.loader(arguments))
    return [
        [batch[1].tolist() for batch in technique.epoch(built)] for _ in range(count)
    ], torch.rand(1).item()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_workers": 2},
        {"shuffle": False, "sampler": RandomSampler(range(24))},
        {
            "batch_size": 1,
            "shuffle": False,
            "batch_sampler": BatchSampler(RandomSampler(range(24)), 4, drop_last=False),
        },
    ],
    ids=["shuffle", "workers", "sampler", "batch sampler"],
)
def test_each_sample_comes_once_an_epoch_in_batches_as_asked(pictures, more):
    (first, second), _ = epochs(asked(pictures, **more), BlockOrder())

    assert [len(batch) for batch in first] == [4] * 6
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(24))
    assert first != second


def test_the_last_batch_is_dropped_as_asked(pictures):
    (first, _), _ = epochs(asked(pictures, batch_size=5, drop_last=True), BlockOrder())

    assert [len(batch) for batch in first] == [5] * 4


def test_the_trainer_s_stream_stays_where_the_script_s_own_shuffle_leaves_it(pictures):
    def plain():
        torch.manual_seed(0)
        built = DataLoader(**asked(pictures))
        return [list(built) for _ in range(2)] and torch.rand(1).item()

    assert epochs(asked(pictures), BlockOrder())[1] == plain()


def test_the_loader_s_own_generator_decides_the_order(pictures):
    def order(seed):
        generator = torch.Generator().manual_seed(seed)
        return epochs(asked(pictures, generator=generator), BlockOrder())[0]

    assert order(1) == order(1) != order(2)


def test_a_loader_that_a_framework_builds_again_keeps_its_order(pictures):
    technique = BlockOrder()
    wanted = technique.loader(asked(pictures))

    again = technique.loader(wanted)

    assert again["sampler"] is wanted["sampler"]


def test_what_was_counted_is_said_at_the_end_in_the_reader_s_language(pictures):
    technique = BlockOrder()
    epochs(asked(pictures), technique)

    said = technique.end()

    assert said == (
        "an epoch has 24 of 24 samples once, with 1 jumps on storage in blocks of 16 and windows "
        "of 4096, and classes fall into batches 1.00 times as unevenly as by a full shuffle"
    )
    assert "샘플 24개 중 24개" in messages("ko").text(said)


def test_a_store_that_another_technique_puts_under_the_loader_is_followed(tmp_path, pictures):
    packed(tmp_path / "images", tmp_path / "store")
    technique = BlockOrder()
    wanted = technique.loader(asked(pictures))
    stored = PackedData(path=str(tmp_path / "store")).loader(wanted)
    built = DataLoader(**stored)
    before = built.sampler.arrangement

    found = [batch[1].tolist() for batch in technique.epoch(built)]

    assert built.sampler.arrangement is not before
    assert sorted(chain(*found)) == list(range(24))
    labels = built.sampler.arrangement.layout.classes
    numbers = built.sampler.arrangement.layout.numbers
    names = [pictures.paths[number].parent.name for number in numbers]
    assert [("cat", "dog", "owl")[label] for label in labels] == names


def test_files_are_not_asked_for_where_a_store_in_another_order_has_their_images(
    tmp_path, pictures
):
    packed(tmp_path / "images", tmp_path / "store")
    turned = Numbered(pictures.paths[::-1])
    technique = BlockOrder()
    stored = PackedData(path=str(tmp_path / "store")).loader(technique.loader(asked(turned)))
    built = DataLoader(**stored)

    found = [batch[1].tolist() for batch in technique.epoch(built)]

    assert built.sampler.arrangement.layout.ask is len
    assert sorted(chain(*found)) == list(range(24))
    assert "24 of 24 samples once" in technique.end()


def test_a_store_packed_from_files_says_that_it_was_shuffled(tmp_path):
    lines = [f'{{"n": {n}}}' for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    packed(tmp_path / "a.jsonl", tmp_path / "store")
    import flatout.data

    technique = BlockOrder()
    technique.loader(asked(flatout.data.open(tmp_path / "store")))

    assert technique.end().endswith("from a store that was shuffled when it was packed")
    assert technique.end() != messages("ko").text(technique.end())


def test_nothing_is_said_of_an_order_that_was_not_drawn():
    assert BlockOrder().end() == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (asked(Numbers(), shuffle=False), "not a plain shuffle"),
        (asked(Numbers(), sampler=WeightedRandomSampler([1.0] * 12, 12), shuffle=False), "plain"),
        (asked(Numbers(), batch_size=1), "not a plain shuffle"),
        (asked(Stream()), "iterable"),
        (asked(Numbers()), "no list of the data set names the files"),
        (asked(Numbers(), shuffle=False, sampler=RandomSampler(range(9))), "each sample once"),
    ],
)
def test_loaders_whose_order_is_kept(arguments, words):
    with pytest.raises(NotApplicable, match=words):
        BlockOrder().loader(arguments)


def test_ranks_that_each_draw_their_own_shuffle_are_left_alone(pictures):
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(NotApplicable, match="2 ranks shuffle"):
            BlockOrder().loader(asked(pictures))
    finally:
        distributed.destroy_process_group()


def reading(blocked, storage=5 * MIB):
    from flatout.records.journey import Journey

    legs = (leg("read", 100.0 * blocked), leg("decode", 100.0 * (1 - blocked)))
    facts = worker(0, storage_bytes_per_step=storage, read_bytes_per_step=10 * MIB)
    return profile(
        phases_ms={"data_wait": 100.0},
        loaders=(loader(),),
        journey=Journey(legs=legs, workers=(facts,)),
    )


def test_it_is_offered_where_workers_wait_for_cold_files():
    assert BlockOrder.candidates(reading(0.5), machine()) == [BlockOrder()]
    assert BlockOrder.candidates(reading(0.05), machine()) == ()
    assert BlockOrder.candidates(reading(0.5, storage=0), machine()) == ()


def test_most_of_the_blocked_reading_is_expected_to_go():
    assert BlockOrder().predict(reading(0.5), machine()).step_ms == pytest.approx(-40.0)


@pytest.mark.parametrize("block", [0, 1, 12, 32])
def test_blocks_of_other_sizes_are_refused(block):
    with pytest.raises(ValueError, match=f"block={block} must be one of 2, 4, 8, 16"):
        BlockOrder(block=block)
