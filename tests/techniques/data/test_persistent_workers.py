import functools
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, WeightedRandomSampler, default_collate

from flatout.data.byte_batches.transport import PackingCollate
from flatout.data.proof.random_streams import EpochStreams
from flatout.records.errors import NotApplicable
from flatout.techniques.data.device_preprocess import DevicePreprocess
from flatout.techniques.data.persistent_workers import PersistentWorkers, draw_missing_seed
from flatout.techniques.data.worker_threads import WorkerThreads
from tests.data.tails import Pictures, numpy_arithmetic
from tests.techniques.data.samples import (
    Augmented,
    CountsEpochs,
    Epochs,
    KeepsAugmented,
    KeepsFiles,
    LateGenerator,
    Numbers,
    OwnGenerators,
    ShufflesInPlace,
    mark_data_set,
    seed_by_worker,
)
from tests.techniques.facts import loader, machine, profile

PROMISE = ("pictures.py", {})


class EagerSampler:
    """A batch sampler that draws its whole order the moment it is asked for an iterator."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(torch.randperm(12).view(4, 3).tolist())


def own_generator():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "shuffled": lambda: {"batch_size": 5, "shuffle": True},
    "own generator": lambda: {"batch_size": 5, "shuffle": True, "generator": own_generator()},
    "in order": lambda: {"batch_size": 5},
    "weighted": lambda: {"batch_size": 5, "sampler": WeightedRandomSampler([1.0] * 12, 12)},
    "eager": lambda: {"batch_sampler": EagerSampler()},
}


def three_epochs(built, before_epoch):
    """Return all batches and where the trainer's random stream stands around each epoch."""
    torch.manual_seed(0)
    seen = []
    for _ in range(3):
        before_epoch(built)
        seen += [(batch.tolist(), torch.rand(1).item()) for batch in built]
        seen.append(torch.rand(1).item())
    return seen


@pytest.mark.parametrize("kind", LOADERS)
def test_three_epochs_repeat_order_and_random_stream_of_a_plain_loader(kind):
    technique = PersistentWorkers()
    plain = {"dataset": Numbers(), "num_workers": 2} | LOADERS[kind]()
    lasting = technique.loader({"dataset": Numbers(), "num_workers": 2} | LOADERS[kind]())

    expected = three_epochs(DataLoader(**plain), lambda _: None)
    found = three_epochs(DataLoader(**lasting), technique.epoch)

    assert found == expected


DRAWING = {
    "global streams": {"dataset": Augmented()},
    "global streams, spawned": {"dataset": Augmented(), "multiprocessing_context": "spawn"},
    "seeded by the script": {"dataset": Augmented(), "worker_init_fn": seed_by_worker},
    "generators of its own": {"dataset": OwnGenerators()},
    "global streams, files kept": {"dataset": KeepsFiles()},
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(x, marks=pytest.mark.slow) if x.endswith("spawned") else x for x in DRAWING],
)
def test_what_workers_draw_is_what_new_ones_would_draw(kind):
    technique = PersistentWorkers()
    asked = {"num_workers": 2, "batch_size": 5, "shuffle": True} | DRAWING[kind]

    expected = three_epochs(DataLoader(**asked), lambda _: None)
    built = DataLoader(**technique.loader(asked))
    found = three_epochs(built, technique.epoch)

    assert found == expected
    assert technique.end() == ""  # and yet they were the same workers throughout
    assert built._iterator is not None


STARTED_ANEW = {
    "samples kept as they were drawn": ({"dataset": KeepsAugmented()}, "keeps augmented ones"),
    "a generator made late": ({"dataset": LateGenerator()}, "generator of its own in its workers"),
    "a count": ({"dataset": CountsEpochs()}, "counts in an attribute"),
    "an order that it keeps": ({"dataset": ShufflesInPlace()}, "other samples once it made some"),
    "a start that acts on the set": (
        {"dataset": Augmented(11), "worker_init_fn": mark_data_set},
        "worker_init_fn changes the data set",
    ),
}


@pytest.mark.parametrize("kind", STARTED_ANEW)
def test_where_a_worker_cannot_become_as_new_it_is_started_anew(kind):
    technique = PersistentWorkers()
    made, why = STARTED_ANEW[kind]
    asked = {"num_workers": 2, "batch_size": 5} | made

    expected = three_epochs(DataLoader(**asked), lambda _: None)
    found = three_epochs(DataLoader(**technique.loader(asked)), technique.epoch)

    assert found == expected
    with pytest.raises(NotApplicable, match=f"{why}.*started again as always"):
        technique.end()


def test_a_generator_that_the_trainer_draws_from_is_seen():
    technique = PersistentWorkers()

    def epochs(before_epoch, prepare):
        dataset = OwnGenerators()
        built = DataLoader(**prepare({"dataset": dataset, "num_workers": 1, "batch_size": 5}))
        seen = []
        for _ in range(3):
            before_epoch(built)
            seen += [batch.tolist() for batch in built]
            dataset.numpy.random()
        return seen

    assert epochs(technique.epoch, technique.loader) == epochs(lambda _: None, lambda x: x)
    with pytest.raises(NotApplicable, match="the trainer draws from a generator"):
        technique.end()


def test_other_techniques_in_the_chain_do_not_hide_the_streams():
    technique = PersistentWorkers()
    asked = {"dataset": Augmented(), "num_workers": 2, "batch_size": 5, "shuffle": True}
    built = DataLoader(**technique.loader(asked))

    def before(loader):
        technique.epoch(loader)
        WorkerThreads().epoch(loader)

    assert three_epochs(built, before) == three_epochs(DataLoader(**asked), lambda _: None)
    assert isinstance(built.worker_init_fn.then, EpochStreams)
    assert technique.end() == ""


def test_a_loader_with_workers_of_its_own_kind_is_left_alone():
    class Stateful(DataLoader):
        def _get_iterator(self):
            return super()._get_iterator()

    technique = PersistentWorkers()
    built = Stateful(**technique.loader({"dataset": Numbers(), "num_workers": 1}))

    with pytest.raises(NotApplicable, match="Stateful has a way of its own"):
        technique.epoch(built)


def test_without_the_technique_persistent_workers_move_the_stream():
    asked = {"dataset": Numbers(), "num_workers": 2, "batch_size": 5, "shuffle": True}

    expected = three_epochs(DataLoader(**asked), lambda _: None)
    found = three_epochs(DataLoader(**asked, persistent_workers=True), lambda _: None)

    assert found != expected


def test_an_epoch_that_is_left_early_repeats_too():
    asked = {"dataset": Numbers(), "num_workers": 2, "batch_size": 2, "shuffle": True}
    technique = PersistentWorkers()

    def first_batches(built, before_epoch):
        torch.manual_seed(0)
        seen = []
        for _ in range(3):
            before_epoch(built)
            for batch in built:
                seen.append(batch.tolist())
                break
            seen.append(torch.rand(1).item())
        return seen

    expected = first_batches(DataLoader(**asked), lambda _: None)
    assert first_batches(DataLoader(**technique.loader(asked)), technique.epoch) == expected


def test_a_collation_that_another_technique_wraps_is_no_change_of_the_script_s():
    noise = np.random.default_rng(0)
    made = [Image.fromarray(noise.integers(0, 256, (50, 60, 3), dtype=np.uint8)) for _ in range(8)]
    asked = {"dataset": Pictures(made, numpy_arithmetic), "batch_size": 4, "num_workers": 1}
    technique = PersistentWorkers()
    built = DataLoader(**technique.loader(asked))
    torch.manual_seed(0)
    found = []

    for _ in range(3):
        technique.epoch(built)
        DevicePreprocess().epoch(built)
        found += [part.clone() for batch in built for part in batch]

    assert isinstance(built.collate_fn, PackingCollate)
    assert technique.end() == ""
    plain = DataLoader(**asked)
    torch.manual_seed(0)
    expected = [part for _ in range(3) for batch in plain for part in batch]
    assert all(map(torch.equal, found, expected))


def test_a_collation_that_the_script_wraps_around_its_own_is_a_change():
    technique = PersistentWorkers()
    asked = {"dataset": Numbers(), "num_workers": 1, "batch_size": 5}

    def epochs(built, before_epoch):
        seen = []
        for _ in range(2):
            before_epoch(built)
            seen += [batch.tolist() for batch in built]
            built.collate_fn = doubled
        return seen

    expected = epochs(DataLoader(**asked), lambda _: None)

    assert epochs(DataLoader(**technique.loader(asked)), technique.epoch) == expected
    with pytest.raises(NotApplicable, match="between epochs: collate_fn"):
        technique.end()


@functools.wraps(default_collate)
def doubled(samples):
    return 2 * default_collate(samples)


def test_the_plain_function_serves_any_loop():
    asked = {"dataset": Numbers(), "num_workers": 2, "batch_size": 5, "shuffle": True}
    lasting = DataLoader(**asked, persistent_workers=True)
    torch.manual_seed(0)

    found = [batch.tolist() for batch in lasting]
    draw_missing_seed(lasting)
    found += [batch.tolist() for batch in lasting]

    plain = DataLoader(**asked)
    torch.manual_seed(0)
    assert found == [batch.tolist() for _ in range(2) for batch in plain]


def test_the_workers_are_the_same_in_every_epoch():
    technique = PersistentWorkers()
    asked = {"dataset": Numbers(), "num_workers": 2, "batch_size": 5}
    built = DataLoader(**technique.loader(asked))

    def process_ids():
        technique.epoch(built)
        iterator = iter(built)
        list(iterator)
        return [worker.pid for worker in iterator._workers]

    assert process_ids() == process_ids()


def test_a_loader_rebuilt_by_a_framework_keeps_the_technique():
    technique = PersistentWorkers()
    asked = {"dataset": Numbers(), "num_workers": 2, "batch_size": 5}
    built = DataLoader(**technique.loader(asked))
    again = asked | {"persistent_workers": built.persistent_workers}

    rebuilt = DataLoader(**technique.loader(again))

    assert technique.epoch(rebuilt) is rebuilt


def test_what_spawned_workers_receive_is_a_plain_true():
    added = PersistentWorkers().loader({"dataset": Numbers(), "num_workers": 2})

    assert pickle.loads(pickle.dumps(added["persistent_workers"])) is True
    assert repr(added["persistent_workers"]) == "True"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"dataset": Numbers(), "num_workers": 2, "persistent_workers": True}, "itself"),
        ({"dataset": Numbers(), "num_workers": 0}, "no workers"),
        ({"dataset": Epochs(), "num_workers": 2}, "set_epoch"),
    ],
)
def test_it_leaves_alone_what_it_cannot_keep_equal(asked, reason):
    technique = PersistentWorkers()

    with pytest.raises(NotApplicable, match=reason):
        technique.loader(asked)
    with pytest.raises(NotApplicable, match="as the script asked"):
        technique.epoch(DataLoader(**asked))


def test_it_is_offered_where_epochs_are_short():
    facts = profile(loaders=(loader(num_workers=2),), epoch_steps=10)

    (found,) = PersistentWorkers.candidates(facts, machine())

    assert found.predict(facts, machine()).step_ms == pytest.approx(-31.0)


def test_fresh_workers_are_taken_to_start_slower_than_forked_ones():
    changes = [
        PersistentWorkers().predict(profile(loaders=(facts,), epoch_steps=10), machine()).step_ms
        for facts in (loader(num_workers=2, start_method=x) for x in ("fork", "spawn"))
    ]

    assert changes == pytest.approx([-31.0, -125.0])


@pytest.mark.parametrize(
    ("facts", "epoch_steps"),
    [
        (loader(num_workers=2), 100_000),
        (loader(num_workers=2), None),
        (loader(num_workers=0), 10),
        (loader(num_workers=2, persistent_workers=True), 10),
    ],
)
def test_it_is_not_offered_where_it_cannot_matter(facts, epoch_steps):
    known = profile(loaders=(facts,), epoch_steps=epoch_steps)

    assert PersistentWorkers.candidates(known, machine()) == ()
