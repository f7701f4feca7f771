from dataclasses import replace

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from flatout.agent import training_device
from flatout.agent.session import Session
from flatout.records.errors import NotApplicable
from flatout.records.trial_spec import TrialSpec
from flatout.techniques.data import device_cache
from flatout.techniques.data.device_cache import DeviceCache, batches_on_device
from flatout.techniques.data.persistent_workers import PersistentWorkers
from tests.techniques.data.samples import Centred, Numbers, Stream
from tests.techniques.facts import GIB, gpu, loader, machine, pipeline, profile

PROMISE = "asked of the guard in tests/data/test_techniques_in_trials.py"


def tensors(length=30):
    return TensorDataset(torch.arange(4.0 * length).reshape(length, 4), torch.arange(length))


class Named(Numbers):
    """Samples of several kinds of values."""

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)), "label": index, "weight": index / 7}


class Words(Numbers):
    def __getitem__(self, index):
        return "word", index


class Growing(Numbers):
    def __getitem__(self, index):
        return torch.zeros(1 + index)


class Noisy(Numbers):
    def __getitem__(self, index):
        return torch.rand(2)


class RarelyNoisy(Numbers):
    """One of which few samples are augmented: those that are looked at are not."""

    def __getitem__(self, index):
        return torch.rand(()) if index == 7 else torch.tensor(float(index))


def plain(arguments):
    return DataLoader(**arguments)


def epochs(build, arguments):
    """Return two epochs' batches as values, types and dtypes, and where the stream stands."""
    torch.manual_seed(0)
    technique = DeviceCache()
    found = []
    built = DataLoader(**arguments) if build is plain else DataLoader(**technique.loader(arguments))
    for _ in range(2):
        iterator = iter(built)
        for batch in iterator if build is plain else technique.batches(iterator, built):
            parts = batch.items() if isinstance(batch, dict) else enumerate(batch)
            found.append([type(batch)] + [(k, v.dtype, v.tolist()) for k, v in parts])
        found.append(torch.rand(1).item())
    return found


@pytest.mark.parametrize("dataset", [tensors(), Named()])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": False, "drop_last": True},
        {"shuffle": True, "num_workers": 2},
        {"shuffle": True, "generator": torch.Generator()},
    ],
)
def test_batches_order_and_random_stream_are_the_same_bit_by_bit(dataset, options):
    asked = {"dataset": dataset, "batch_size": 7, **options}
    generator = options.get("generator")

    expected = epochs(plain, asked)
    if generator is not None:
        generator.manual_seed(0)
        expected = epochs(plain, asked)
        generator.manual_seed(0)

    assert epochs(DeviceCache, asked) == expected


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 2, "prefetch_factor": 1}])
@pytest.mark.parametrize("batches", [1, 3, 4])
def test_the_sampler_draws_when_workers_would_have_it_draw(options, batches):
    def left_early(build):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        asked = {"dataset": tensors(), "batch_size": 7, "shuffle": True, **options}
        found = []
        for given in (generator, None):
            built = build(asked | {"generator": given})
            for _ in range(2):
                iterator = started(build, built)
                found.append(torch.rand(1).item())  # between the start and the first batch
                found += [next(iterator)[1].tolist() for _ in range(batches)]
                found.append(generator.get_state().tolist())
        return found

    assert left_early(Cached()) == left_early(plain)


class Cached:
    """Builds loaders through one technique, as one process does."""

    def __init__(self):
        self.technique = DeviceCache()

    def __call__(self, arguments):
        return DataLoader(**self.technique.loader(arguments))


def started(build, built):
    return iter(built) if build is plain else build.technique.batches(iter(built), built)


def test_a_changed_batch_does_not_change_the_set():
    technique = DeviceCache()
    asked = {"dataset": tensors(), "batch_size": 30}
    built = DataLoader(**technique.loader(asked))
    for batch in technique.batches(iter(built), built):
        batch[0].zero_()

    (again,) = technique.batches(iter(built), built)

    assert torch.equal(again[0], asked["dataset"].tensors[0])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"dataset": Stream()}, "map-style"),
        ({"dataset": [1, 2]}, "map-style"),
        ({"dataset": tensors(0)}, "map-style"),
        ({"dataset": tensors(), "collate_fn": list}, "way of its own"),
        ({"dataset": tensors(), "batch_size": None}, "does not make batches"),
        (
            {"dataset": tensors(), "sampler": WeightedRandomSampler([1.0] * 30, 30)},
            "WeightedRandomSampler may draw",
        ),
    ],
)
def test_loaders_whose_batches_cannot_be_picked(asked, words):
    with pytest.raises(NotApplicable, match=words):
        DeviceCache().loader(asked)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Noisy(), "draws random numbers"),
        (RarelyNoisy(40), "draws random numbers"),
        (Words(), "holds a str"),
        (Growing(), "do not stack"),
        (Centred(), "differ from its single samples"),
    ],
)
def test_sets_that_cannot_be_kept(dataset, words):
    before = torch.get_rng_state()

    with pytest.raises(NotApplicable, match=words):
        DeviceCache().loader({"dataset": dataset, "batch_size": 4})
    assert torch.equal(torch.get_rng_state(), before)


def test_a_set_that_does_not_fit_is_said(monkeypatch):
    monkeypatch.setattr("flatout.techniques.data.device_cache.free_memory_bytes", lambda: 100)

    with pytest.raises(NotApplicable, match="GB are free"):
        DeviceCache().loader({"dataset": tensors(), "batch_size": 4})


def test_a_loader_whose_workers_live_on_draws_other_numbers_and_is_left_alone():
    technique = DeviceCache()
    asked = {"dataset": tensors(), "batch_size": 7, "num_workers": 1, "persistent_workers": True}
    built = DataLoader(**asked)

    with pytest.raises(NotApplicable, match="one seed for all epochs"):
        technique.loader(asked)
    for hook_point in (technique.epoch, lambda x: technique.batches(iter([]), x)):
        with pytest.raises(NotApplicable, match="one seed for all epochs"):
            hook_point(built)
    assert DeviceCache.candidates(waiting(num_workers=1, persistent_workers=True), machine()) == ()


def test_workers_that_a_technique_keeps_alive_are_no_reason():
    asked = {"dataset": tensors(), "batch_size": 7, "num_workers": 2}

    wanted = DeviceCache().loader(PersistentWorkers().loader(asked))

    assert not DataLoader(**wanted).persistent_workers


def test_another_loader_of_the_same_set_is_looked_at_by_itself():
    technique = DeviceCache()
    dataset = tensors()
    technique.loader({"dataset": dataset, "batch_size": 4})
    other = DataLoader(dataset, batch_size=4, collate_fn=len)

    with pytest.raises(NotApplicable, match="way of its own"):
        technique.batches(iter(other), other)


def test_the_function_gives_every_sample_of_an_epoch_once():
    built = DataLoader(tensors(), batch_size=4, sampler=RandomSampler(range(30)))

    found = [batch[1].tolist() for batch in batches_on_device(built, "cpu")]

    assert sorted(number for batch in found for number in batch) == list(range(30))


def waiting(**changes):
    return profile(phases_ms={"data_wait": 50.0}, loaders=(loader(**changes),))


def test_it_is_offered_where_the_set_fits_beside_the_training():
    assert DeviceCache.candidates(waiting(), machine()) == [DeviceCache()]
    assert DeviceCache.candidates(waiting(dataset_len=10**6), machine()) == ()
    assert DeviceCache.candidates(waiting(is_iterable=True), machine()) == ()
    assert DeviceCache.candidates(profile(loaders=(loader(),)), machine()) == ()


def test_samples_that_change_or_take_too_long_to_make_are_no_reason_to_try():
    random = replace(waiting(), pipeline=pipeline(is_repeated=False, python=1))
    slow = waiting(dataset_len=10_000)  # 50 ms for ten samples: 50 s in all

    assert DeviceCache.candidates(random, machine()) == ()
    assert DeviceCache.candidates(slow, machine()) == ()
    assert DeviceCache.candidates(waiting(dataset_len=10_000, dataset="TensorDataset"), machine())


def test_on_a_gpu_the_copies_go_too_and_the_set_takes_memory():
    facts = profile(kind="cuda", phases_ms={"data_wait": 20.0, "h2d": 10.0}, loaders=(loader(),))

    effect = DeviceCache().predict(facts, machine(device=gpu()))

    assert -30 < effect.step_ms < -29
    assert effect.peak_bytes == 100 * 1_000_000 < GIB


def optimizer_on(monkeypatch, name):
    """Let techniques see a GPU and the optimizer of a training elsewhere.

    No session is made for it.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    session = Session(TrialSpec())
    optimizer = torch.optim.SGD([torch.zeros(1, device=name, requires_grad=True)])
    session.add_optimizer(optimizer)
    monkeypatch.setattr(training_device, "_followed", [lambda: optimizer and session])


def test_a_training_on_the_cpu_gets_its_batches_there_though_a_gpu_is_in_sight(monkeypatch):
    technique = DeviceCache()
    optimizer_on(monkeypatch, "cpu")
    built = DataLoader(**technique.loader({"dataset": tensors(), "batch_size": 7}))

    found = list(technique.batches(iter(built), built))

    assert all(x.device.type == "cpu" for batch in found for x in batch)


@pytest.mark.parametrize("dataset", [tensors(), Named()])
def test_the_set_goes_where_the_model_went_after_the_loader_was_made(monkeypatch, dataset):
    technique = DeviceCache()
    optimizer_on(monkeypatch, "cpu")
    built = DataLoader(**technique.loader({"dataset": dataset, "batch_size": 7}))
    place = torch.device("meta")  # any other than the host's
    monkeypatch.setattr(device_cache, "batch_device", lambda: place)

    first = next(technique.batches(iter(built), built))

    parts = first.values() if isinstance(first, dict) else first
    assert all(x.device == place for x in parts)


def test_a_set_that_does_not_fit_beside_the_model_is_said_when_it_is_moved(monkeypatch):
    technique = DeviceCache()
    optimizer_on(monkeypatch, "cpu")
    built = DataLoader(**technique.loader({"dataset": tensors(), "batch_size": 7}))
    monkeypatch.setattr(device_cache, "batch_device", lambda: torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 10**9))

    with pytest.raises(NotApplicable, match="GB are free"):
        technique.batches(iter(built), built)


@pytest.mark.gpu
def test_batches_lie_on_the_gpu():
    technique = DeviceCache()
    built = DataLoader(**technique.loader({"dataset": tensors(), "batch_size": 7}))

    found = list(technique.batches(iter(built), built))

    assert all(x.is_cuda for batch in found for x in batch)
    assert torch.equal(torch.cat([b[1] for b in found]).cpu(), torch.arange(30))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"batch_size": 7}, {"batch_size": 7, "shuffle": True}])
def test_batches_on_the_gpu_are_the_plain_loader_s_in_every_epoch(options):
    technique = DeviceCache()
    torch.manual_seed(0)
    plain = DataLoader(tensors(), **options)
    expected = [[x.clone() for x in batch] for _ in range(3) for batch in plain]
    torch.manual_seed(0)
    built = DataLoader(**technique.loader({"dataset": tensors(), **options}))

    found = [batch for _ in range(3) for batch in technique.batches(iter(built), built)]

    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(x.is_cuda for x in mine)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(mine, theirs, strict=True))
