import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from flatout.data.byte_batches.transport import PackingCollate
from flatout.records.errors import NotApplicable
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome
from flatout.techniques.data import device_preprocess
from flatout.techniques.data.device_preprocess import DevicePreprocess, send_bytes
from flatout.tuning.guard_checker import GuardChecker
from flatout.tuning.trial_runner import TrialRunner
from flatout.tuning.trials import TrialOptions, run_trial
from flatout.workflow.demo import scenarios
from tests.data.photographs import photograph
from tests.data.tails import Pictures, numpy_arithmetic, standardised
from tests.support.programs import workload_of
from tests.techniques.data.samples import Stream, gpu_in_sight
from tests.techniques.facts import gpu, loader, machine, profile
from tests.techniques.guarded import machine as real_machine

PROMISE = ("pictures.py", {})


@pytest.fixture(scope="module")
def pictures():
    noise = np.random.default_rng(0)
    made = [noise.integers(0, 256, (50, 60, 3), dtype=np.uint8) for _ in range(8)]
    return [Image.fromarray(pixels) for pixels in made]


def starved(kind="cpu", wait_ms=300.0, **changes):
    known = {"batch_size": 8, "batch_bytes": 8 * 600_000}
    return profile(
        kind=kind, phases_ms={"data_wait": wait_ms}, loaders=(loader(**known | changes),)
    )


class OwnIterator(DataLoader):
    """A loader such as torchdata's, whose iterators are not torch's: nothing would be restored."""

    def _get_iterator(self):
        return (self.collate_fn([self.dataset[i]]) for i in range(len(self.dataset)))


def test_a_loader_with_iterators_of_its_own_is_left_alone(pictures):
    built = OwnIterator(Pictures(pictures, numpy_arithmetic))

    with pytest.raises(NotApplicable, match="OwnIterator has a way of its own"):
        DevicePreprocess().epoch(built)

    assert type(next(iter(built))[0]) is torch.Tensor


def test_the_proof_leaves_the_random_streams_where_they_were(pictures):
    built = DataLoader(Pictures(pictures, numpy_arithmetic), 4, shuffle=True)
    torch.manual_seed(0)
    random.seed(0)
    expected = [x.clone() for batch in built for x in batch]
    torch.manual_seed(0)
    random.seed(0)

    DevicePreprocess().epoch(built)

    assert isinstance(built.collate_fn, PackingCollate)
    assert all(map(torch.equal, (x for batch in built for x in batch), expected))


@pytest.fixture
def place(monkeypatch):
    """What sets where the training is, on a machine with a GPU."""
    return gpu_in_sight(monkeypatch, device_preprocess)


def test_images_of_a_training_on_the_cpu_are_not_scaled_on_a_gpu_in_sight(pictures, place):
    built = DataLoader(Pictures(pictures, numpy_arithmetic), 4)
    before = built.collate_fn
    place("cpu")

    with pytest.raises(NotApplicable, match="runs on cpu"):
        DevicePreprocess(on_device=True).epoch(built)

    assert built.collate_fn is before


def test_images_are_scaled_where_the_model_is_by_the_time_of_the_epoch(pictures, place):
    built = DataLoader(Pictures(pictures, numpy_arithmetic), 4)
    found = []

    for name in ("cuda:0", "cuda:1"):
        place(name)
        found.append(str(DevicePreprocess(on_device=True).epoch(built).collate_fn.device))

    assert found == ["cuda:0", "cuda:1"]
    place("cpu")
    with pytest.raises(NotApplicable, match="runs on cpu"):
        DevicePreprocess(on_device=True).epoch(built)
    assert built.collate_fn.device == torch.device("cpu")


def test_a_second_epoch_needs_no_second_proof(pictures, monkeypatch):
    built = DevicePreprocess().epoch(DataLoader(Pictures(pictures, numpy_arithmetic), 4))
    once = built.collate_fn
    monkeypatch.setattr("flatout.data.proof.batches.in_forks", None)

    assert DevicePreprocess().epoch(built).collate_fn is once


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (lambda p: Pictures(p, standardised), "no floating-point tensor"),
        (lambda _: Stream(), "iterable"),
        (lambda p: Pictures(p, lambda _: 1 / 0), "could not be made in the script's own way"),
        (lambda p: Pictures(p, lambda x: torch.from_numpy(np.array(x))), "no floating-point"),
    ],
)
def test_what_cannot_travel_as_bytes_is_left_alone_with_the_reason(pictures, dataset, reason):
    built = DataLoader(dataset(pictures), 4)
    before = built.collate_fn

    for _ in range(2):
        with pytest.raises(NotApplicable, match=reason):
            DevicePreprocess().epoch(built)
    assert built.collate_fn is before


def test_samples_that_differ_between_two_copies_of_the_process_are_left_alone(pictures):
    def unlike(image):
        return numpy_arithmetic(image) * random.SystemRandom().random()

    with pytest.raises(NotApplicable, match="differ in the values"):
        send_bytes(DataLoader(Pictures(pictures, unlike), 4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_without_a_gpu_there_is_no_device_to_scale_on(pictures):
    with pytest.raises(NotApplicable, match="no CUDA device"):
        DevicePreprocess(on_device=True).epoch(DataLoader(Pictures(pictures, numpy_arithmetic), 4))


def test_it_is_offered_where_a_loop_waits_for_images():
    (found,) = DevicePreprocess.candidates(starved(), machine())

    effect = found.predict(starved(), machine())
    assert not found.on_device
    assert -110 < effect.step_ms < 0


def test_workers_share_what_is_saved():
    alone = DevicePreprocess().predict(starved(), machine()).step_ms
    shared = DevicePreprocess().predict(starved(num_workers=2), machine()).step_ms

    assert alone < shared < 0


def test_beside_a_gpu_the_device_scales():
    (found,) = DevicePreprocess.candidates(starved(kind="cuda"), machine(device=gpu()))

    assert found.on_device


@pytest.mark.parametrize(
    "facts",
    [starved(wait_ms=1.0), starved(batch_bytes=8 * 4_000), starved(is_iterable=True), profile()],
)
def test_it_is_not_offered_where_it_cannot_matter(facts):
    assert DevicePreprocess.candidates(facts, machine()) == ()


@pytest.fixture(scope="module")
def starved_referee(tmp_path_factory):
    """A referee that has run the reference trials of the starved script."""
    pytest.importorskip("simplejpeg")
    work = tmp_path_factory.mktemp("starved")
    shutil.copy(scenarios() / "starved_images" / "train.py", work)
    for number in range(48):
        folder = work / "photos" / str(number % 3)
        folder.mkdir(parents=True, exist_ok=True)
        photograph(folder, number, (130, 120))
    options = "--data photos --width 8 --image-size 64 --epochs 50 --batch-size 8"
    workload = workload_of(work, "train.py", *options.split())
    lab = TrialRunner(
        workload=workload,
        machine=real_machine(),
        out=tmp_path_factory.mktemp("reference"),
        limit_s=200.0,
    )
    referee = GuardChecker(lab, lambda _: None)
    referee._make_reference()
    return referee


@pytest.mark.slow
@pytest.mark.parametrize(
    "techniques", [("device_preprocess",), ("fast_decode", "device_preprocess")]
)
def test_the_guard_finds_the_unmodified_starved_script_bit_identical(
    tmp_path, starved_referee, techniques
):
    lab = replace(starved_referee.lab, out=tmp_path)
    recipe = Recipe(
        choices=(
            Choice(technique="loader_workers", settings={"num_workers": 2}),
            *(Choice(technique=name) for name in techniques),
        )
    )

    verdict = replace(starved_referee, lab=lab).check(recipe)
    trial = run_trial(lab.workload, recipe, lab.machine, TrialOptions(limit_s=200.0, steps=8))

    assert verdict.passed, verdict.why
    assert not any(verdict.worst.values()), verdict.why
    assert trial.outcome is Outcome.OK
    assert trial.not_applied == ()


class Forgiving(Pictures):
    """Skips pictures that cannot be read, as scripts do."""

    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except Exception:  # noqa: BLE001
            return super().__getitem__(0)


def test_a_data_set_that_hides_errors_is_left_alone(pictures):
    with pytest.raises(NotApplicable, match=r"Forgiving\.__getitem__ goes on after errors"):
        send_bytes(DataLoader(Forgiving(pictures, numpy_arithmetic), 4))
