from collections import namedtuple
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from flatout.records.errors import NotApplicable
from flatout.techniques.data import device_prefetch
from flatout.techniques.data.device_prefetch import (
    DevicePrefetch,
    _AheadIterator,
    prefetch_to_device,
)
from tests.techniques.data.samples import Numbers, Stream, gpu_in_sight
from tests.techniques.facts import gpu, loader, machine, profile

PROMISE = "acts on a CUDA device only: a stream of copies"

Pair = namedtuple("Pair", "image label")


class NoCopy:
    """Stands for the side stream where there is no CUDA device; notes when a copy begins."""

    def __init__(self):
        self.begun = []

    def begin(self, batch):
        self.begun.append(batch)
        return lambda: batch


def copying(kind="cuda", h2d_ms=20.0, workers=2):
    return profile(
        kind=kind,
        phases_ms={"h2d": h2d_ms, "forward": 40.0, "backward": 60.0},
        loaders=(loader(num_workers=workers),),
    )


def test_the_next_copy_begins_before_the_present_batch_is_used():
    copy = NoCopy()
    ahead = _AheadIterator(iter("abc"), copy)

    first = next(ahead)

    assert (first, copy.begun) == ("a", ["a", "b"])
    assert list(ahead) == ["b", "c"]
    assert list(ahead) == []


def test_an_empty_loader_stays_empty():
    assert list(_AheadIterator(iter(()), NoCopy())) == []


class AsItGoes(Sampler):
    """A sampler that draws each number from the stream that the steps draw from as well."""

    def __iter__(self):
        yield from (torch.randint(12, ()).item() for _ in range(12))

    def __len__(self):
        return 12


class Broken(Numbers):
    def __getitem__(self, index):
        return super().__getitem__(index // (index != 9))


def steps(batches, generator=None, count=100):
    """Return what a loop has: batches, what its steps draw, and the loader's error."""
    found = []
    try:
        for batch in islice(batches, count):
            found += [batch.tolist(), torch.randint(99, (), generator=generator).item()]
    except ZeroDivisionError:
        found.append("broken")
    return found


@pytest.mark.parametrize(("workers", "ahead"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"sampler": AsItGoes()}, 100),
        ({"sampler": AsItGoes()}, 3),
        ({"shuffle": True, "generator": torch.Generator()}, 100),
        ({"shuffle": True, "generator": torch.Generator()}, 2),
        ({"dataset": Broken()}, 100),
    ],
)
def test_samplers_draw_and_errors_come_where_they_do_without_it(options, count, workers, ahead):
    generator = options.get("generator")
    asked = {"dataset": Numbers(), "num_workers": workers, "prefetch_factor": ahead, **options}

    def epochs(wrap):
        torch.manual_seed(0)
        if generator is not None:
            generator.manual_seed(0)
        built = DataLoader(batch_size=2, **asked)
        return [steps(wrap(iter(built)), generator, count) for _ in range(2)]

    expected = epochs(lambda batches: batches)

    assert epochs(lambda batches: _AheadIterator(batches, NoCopy())) == expected


def test_a_batch_is_prepared_ahead_until_the_last():
    copy = NoCopy()
    ahead = _AheadIterator(iter(DataLoader(Numbers(), batch_size=3, num_workers=1)), copy)

    begun = [len(copy.begun) for _ in ahead]

    assert begun == [2, 3, 4, 4]


def test_an_iterator_that_is_not_torchs_own_is_taken_with_known_samplers_only(place, monkeypatch):
    place("cuda:0")
    monkeypatch.setattr(device_prefetch, "prefetch_to_device", lambda batches, _: list(batches))
    known = DataLoader(Numbers(), num_workers=1)
    own = DataLoader(Numbers(), num_workers=1, sampler=AsItGoes())

    assert DevicePrefetch().batches(iter("ab"), known) == ["a", "b"]
    assert DevicePrefetch().batches(iter("ab"), DataLoader(Stream(), num_workers=1)) == ["a", "b"]
    with pytest.raises(NotApplicable, match="AsItGoes may draw numbers as it goes"):
        DevicePrefetch().batches(iter("ab"), own)


def test_whatever_else_a_loop_asks_goes_to_the_loaders_iterator():
    iterator = iter(DataLoader(Numbers(), batch_size=5))

    ahead = _AheadIterator(iterator, NoCopy())

    assert len(ahead) == 3
    assert ahead._num_yielded == 0
    assert iter(ahead) is ahead


def test_the_plain_function_wants_a_cuda_device():
    with pytest.raises(ValueError, match="give device='cuda'"):
        prefetch_to_device([1], "cpu")


def test_it_is_offered_where_a_gpu_waits_for_copies_and_pays_with_one_batch():
    facts = copying()

    (found,) = DevicePrefetch.candidates(facts, machine(device=gpu()))

    effect = found.predict(facts, machine(device=gpu()))
    assert effect.step_ms == pytest.approx(-20.0)
    assert effect.peak_bytes == 1_000_000


@pytest.mark.parametrize("facts", [copying(kind="cpu"), copying(h2d_ms=1.0), copying(workers=0)])
def test_it_is_not_offered_where_it_cannot_matter(facts):
    assert DevicePrefetch.candidates(facts, machine(device=gpu())) == ()


def test_without_workers_it_would_move_the_random_stream():
    with pytest.raises(NotApplicable, match="random stream"):
        DevicePrefetch().loader({"dataset": Numbers(), "num_workers": 0})


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_do():
    built = DataLoader(Numbers(), num_workers=1)

    with pytest.raises(NotApplicable, match="there is none"):
        DevicePrefetch().loader({"dataset": Numbers(), "num_workers": 1})
    with pytest.raises(NotApplicable, match="no CUDA device"):
        DevicePrefetch().batches(iter(()), built)


@pytest.fixture
def place(monkeypatch):
    """What sets where the training is, on a machine with a GPU."""
    return gpu_in_sight(monkeypatch, device_prefetch)


def test_batches_of_a_training_on_the_cpu_stay_there_though_a_gpu_is_in_sight(place):
    place("cpu")

    with pytest.raises(NotApplicable, match="runs on cpu"):
        DevicePrefetch().batches(iter(()), DataLoader(Numbers(), num_workers=1))


def test_batches_go_where_the_model_is_and_not_to_the_current_device(place, monkeypatch):
    place("cuda:1")
    monkeypatch.setattr(device_prefetch, "prefetch_to_device", lambda _, device: device)

    found = DevicePrefetch().batches(iter(()), DataLoader(Numbers(), num_workers=1))

    assert found == torch.device("cuda:1")


@pytest.mark.gpu
def test_batches_arrive_on_the_device_in_order_with_their_structure():
    given = [Pair({"x": torch.full((64, 1024), float(i)).pin_memory()}, [i]) for i in range(8)]

    found = list(prefetch_to_device(given, "cuda"))

    assert all(type(pair) is Pair and pair.image["x"].is_cuda for pair in found)
    assert [pair.label for pair in found] == [[i] for i in range(8)]
    assert [pair.image["x"].unique().item() for pair in found] == list(range(8))


@pytest.mark.gpu
def test_a_batch_is_not_overwritten_while_it_is_computed_with():
    given = [torch.full((4_000_000,), float(i)).pin_memory() for i in range(30)]
    weight = torch.ones(1, device="cuda")
    sums = []

    for batch in prefetch_to_device(given, "cuda"):
        torch.cuda._sleep(20_000_000)  # the copy ahead has time to go wrong
        sums.append((batch * weight).double().mean())
        del batch

    assert [value.item() for value in sums] == list(range(30))


@pytest.mark.gpu
def test_an_epoch_of_the_technique_is_the_plain_loader_s_on_the_device():
    data = TensorDataset(torch.randn(200, 1000), torch.arange(200))
    options = {"dataset": data, "batch_size": 16, "shuffle": True, "num_workers": 1}
    torch.manual_seed(0)
    expected = [batch for _ in range(2) for batch in DataLoader(**options)]
    torch.manual_seed(0)
    built = DataLoader(**DevicePrefetch().loader(options))

    found = []
    for _ in range(2):
        for batch in DevicePrefetch().batches(iter(built), built):
            torch.cuda._sleep(5_000_000)  # the copies ahead have time to go wrong
            found.append([x * 1 for x in batch])

    assert all(x.is_cuda for batch in found for x in batch)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(x.cpu(), y) for x, y in zip(mine, theirs, strict=True))
