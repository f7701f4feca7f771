import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, RandomSampler

from flatout.records.errors import NotApplicable
from flatout.techniques.data.length_buckets import LengthBuckets
from tests.data.texts import Texts
from tests.techniques.data.samples import Numbers, Stream
from tests.techniques.facts import loader, machine, model, profile

PROMISE = "this module counts every sample of an epoch"


def epoch(arguments):
    return [batch["number"].tolist() for batch in DataLoader(**arguments)]


@pytest.mark.parametrize(
    "asked",
    [
        {"shuffle": True},
        {"sampler": RandomSampler(range(24))},
        {"shuffle": True, "num_workers": 2},
    ],
)
def test_every_sample_comes_once_beside_samples_of_its_length(asked):
    wanted = LengthBuckets().loader({"dataset": Texts(), "batch_size": 4, **asked})

    found = epoch(wanted)

    assert sorted(i for batch in found for i in batch) == list(range(24))
    assert all(len({i % 6 for i in batch}) == 1 for batch in found)


def test_the_last_batch_is_dropped_as_asked():
    asked = {"dataset": Texts(26), "batch_size": 4, "shuffle": True, "drop_last": True}

    found = epoch(LengthBuckets().loader(asked))

    assert [len(batch) for batch in found] == [4] * 6


def test_the_loaders_own_generator_decides_the_order():
    def order(seed):
        generator = torch.Generator().manual_seed(seed)
        asked = {"dataset": Texts(), "batch_size": 4, "shuffle": True, "generator": generator}
        return epoch(LengthBuckets().loader(asked))

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"dataset": Texts(), "batch_size": 4}, "not a plain shuffle"),
        ({"dataset": Texts(), "batch_size": 1, "shuffle": True}, "not a plain shuffle"),
        ({"dataset": Stream(), "batch_size": 4, "shuffle": True}, "map-style"),
        ({"dataset": Numbers(), "batch_size": 4, "shuffle": True}, "no input_ids"),
        (
            {"dataset": Texts(), "batch_size": 4, "sampler": RandomSampler(range(9))},
            "each sample once",
        ),
    ],
)
def test_loaders_whose_order_is_kept(asked, words):
    with pytest.raises(NotApplicable, match=words):
        LengthBuckets().loader(asked)


@pytest.mark.parametrize("asked", [{"shuffle": True}, {"sampler": RandomSampler(range(24))}])
def test_ranks_that_each_draw_their_own_shuffle_are_left_alone(monkeypatch, asked):
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(NotApplicable, match="2 ranks shuffle without a DistributedSampler"):
        LengthBuckets().loader({"dataset": Texts(), "batch_size": 4, **asked})


def test_ranks_of_a_process_group_are_known_without_a_launcher():
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(NotApplicable, match="2 ranks shuffle"):
            LengthBuckets().loader({"dataset": Texts(), "batch_size": 4, "shuffle": True})
    finally:
        distributed.destroy_process_group()


def padded(share, shapes):
    loaders = (loader(pad_share=share),)
    return profile(loaders=loaders, models=(model(input_shapes=shapes),))


def test_it_is_offered_where_lengths_vary():
    assert LengthBuckets.candidates(padded(0.3, 5), machine()) == [LengthBuckets()]
    assert LengthBuckets.candidates(padded(0.3, 1), machine()) == ()
    assert LengthBuckets.candidates(padded(0.0, 5), machine()) == ()


def test_most_of_the_padding_is_expected_to_go():
    assert LengthBuckets().predict(padded(0.3, 5), machine()).step_ms == pytest.approx(-27.0)
