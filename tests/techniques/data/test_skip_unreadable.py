import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from flatout.core.errors import NotApplicable
from flatout.core.recipe import Choice, Recipe
from flatout.core.trial import Outcome
from flatout.core.workload import Workload
from flatout.data.filling import find_plan
from flatout.data.unreadable import forget
from flatout.techniques import technique_class as kind_of
from flatout.techniques.data.device_cache import DeviceCache
from flatout.techniques.data.skip_unreadable import (
    SkipUnreadable,
    fill_unreadable,
    what_was_left_out,
)
from flatout.workflow.recipes import write_recipe
from flatout.workflow.trials import TrialOptions, run_trial
from tests.data.broken import BAD, OneByOne, Opened, broken_photographs
from tests.techniques.data.samples import Numbers
from tests.techniques.facts import machine, profile
from tests.techniques.guarded import machine as real_machine

PROMISE = ("pictures.py", {})
ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).parents[1] / "scripts" / "broken_files.py"
SHARE = {"most_share": 0.5}
SETTINGS = {"skip_unreadable": SHARE, "device_preprocess": {"with_scaling": True}}
SEEN = [0, 1, 2, 0, 4, 5, 6, 7, 8, 10, 10, 11, 12, 13, 15, 15, 16, 17, 18, 19]


@pytest.fixture(autouse=True)
def new_log():
    forget()
    yield
    forget()


@pytest.fixture
def folder(tmp_path):
    broken_photographs(tmp_path)
    return tmp_path


def test_each_epoch_of_a_loader_is_filled_and_all_is_told_at_the_end(folder):
    lever = SkipUnreadable(**SHARE)
    loader = DataLoader(Opened([str(folder / f"{n:04}.jpg") for n in range(20)]), 4)

    for _ in range(2):
        assert lever.epoch(loader) is loader
        found = [label for _, labels in loader for label in labels.tolist()]

    assert found == SEEN
    assert what_was_left_out().count == 6
    said = lever.end()
    assert said.startswith("6 samples left out in 2 epochs of loaders (6 by the training process)")
    assert all(f"{number:04}.jpg" in said for number in BAD)
    assert lever.end() == "no sample was left out"


def test_a_loader_is_wrapped_once_and_keeps_its_collation(folder):
    loader = DataLoader(Numbers(), 4, collate_fn=list)

    fill_unreadable(fill_unreadable(loader))

    assert find_plan(loader.collate_fn).collate is list


def test_single_samples_have_no_batch_to_be_filled_from():
    with pytest.raises(NotApplicable, match="single samples"):
        SkipUnreadable().epoch(DataLoader(Numbers(), batch_size=None))


def test_a_stream_among_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(NotApplicable, match="fewer steps than the others"):
        SkipUnreadable().epoch(DataLoader(OneByOne(["a"]), 4))
    SkipUnreadable().epoch(DataLoader(Numbers(), 4))


def test_it_promises_no_speed():
    effect = SkipUnreadable().predict(profile(), machine())

    assert (effect.step_ms, effect.peak_bytes, effect.startup_s) == (0, 0, 0)
    assert "makes nothing faster" in effect.why


@pytest.mark.parametrize("share", [0, 1, -0.1, 2])
def test_a_share_without_sense_is_refused(share):
    with pytest.raises(ValueError, match="most_share="):
        SkipUnreadable(most_share=share)


def recipe_of(**settings):
    return Recipe(choices=(Choice(technique="skip_unreadable", settings=settings),))


def command(folder, *words, **settings):
    """Run a command of flatout in the folder, with the lever."""
    write_recipe(recipe_of(**settings), folder / "recipe.toml")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, "-m", "flatout", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def run(folder, workers, **settings):
    return command(folder, "run", "--with", "recipe.toml", str(SCRIPT), str(workers), **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "who"), [(0, "6 by the training process"), (2, "by worker 1")])
def test_a_run_trains_to_the_end_and_names_what_it_left_out(folder, workers, who):
    done = run(folder, workers, **SHARE)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split("saw ")[1].split() == [str(number) for number in SEEN * 2]
    (said,) = re.findall(r"flatout: skip_unreadable: (.*)", done.stderr)
    assert said.startswith("6 samples left out in 2 epochs of loaders")
    assert who in said
    assert "3 different ones" in said
    assert all(f"{folder}/{number:04}.jpg" in said for number in BAD)


@pytest.mark.slow
def test_a_run_with_too_many_broken_files_ends_with_their_number(folder):
    done = run(folder, 0)

    assert done.returncode == 1
    assert re.search(r"UnreadableError: 2 of 20 samples of an epoch cannot be read", done.stderr)


@pytest.mark.slow
def test_every_rank_tells_what_it_left_out(folder):
    write_recipe(recipe_of(**SHARE), folder / "recipe.toml")
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29531")

    done = command(folder, "run", "--with", "recipe.toml", *ranks, str(SCRIPT), "1", **SHARE)

    assert done.returncode == 0, done.stderr
    told = dict(re.findall(r"flatout: rank (\d): skip_unreadable: (\d+) samples", done.stderr))
    # Ranks take turns: the third broken one has an even number, the others odd ones.
    assert told == {"0": "2", "1": "4"}


def trial(folder, recipe, workers="2"):
    workload = Workload(
        target=str(SCRIPT), arguments=(workers,), folder=folder, python=sys.executable
    )
    options = TrialOptions(limit_s=100.0, measure_s=5.0, steps=8)
    return run_trial(workload, recipe, real_machine(), options)


@pytest.fixture
def tests_in_sight(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.slow
@pytest.mark.usefixtures("tests_in_sight")
def test_a_trial_has_the_count_in_its_result(folder):
    found = trial(folder, recipe_of(**SHARE))

    (applied,) = found.applied
    assert applied.status == "applied", found.message
    assert re.match(r"\d samples left out in 2 epochs of loaders", applied.why)
    assert applied.why in str(found.to_json())


@pytest.mark.slow
@pytest.mark.usefixtures("tests_in_sight")
def test_without_the_lever_the_fault_names_it(folder):
    found = trial(folder, Recipe())

    assert found.outcome is Outcome.CRASH
    assert found.details["fault"] == "bad_image"
    assert "a recipe with skip_unreadable leaves them out" in found.message


@pytest.mark.slow
@pytest.mark.usefixtures("tests_in_sight")
def test_a_trial_that_gave_up_says_so(folder):
    found = trial(folder, recipe_of(), workers="0")

    assert found.outcome is Outcome.CRASH
    assert found.details["fault"] == "too_unreadable"
    assert found.message.startswith("too_unreadable: skip_unreadable gave up: 2 of 20 samples")


class Prepared(Opened):
    """Pictures cut, made small and made floats, so that every lever finds something to do."""

    def __getitem__(self, index):
        with Image.open(self.paths[index]) as picture:
            image = picture.convert("RGB")
        image = image.crop((8, 8, 656, 656)).resize((160, 160), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        return (pixels - 0.5) / 0.25, index


BESIDE = (
    *("fast_decode", "fast_resize", "region_decode", "scaled_decode", "device_preprocess"),
    *("ram_cache", "read_ahead", "persistent_workers", "worker_threads", "device_cache"),
)
NEEDS_ALL = {"ram_cache", "device_cache"}
"""They ask for samples themselves before the first batch, the broken ones too."""


def played(names, paths):
    """Return what becomes of levers over two epochs, the labels of these, and the samples."""
    levers = [kind_of(name)(**SETTINGS.get(name, {})) for name in names]
    answers = {}

    def ask(seam, value, *more):
        for name, lever in zip(names, levers, strict=True):
            try:
                value = getattr(lever, seam)(value, *more)
            except NotApplicable as reason:  # noqa: PERF203  each is asked whatever the last said
                answers.setdefault(name, str(reason))
        return value

    asked = {"dataset": Prepared(paths), "batch_size": 4, "num_workers": 2}
    loader = DataLoader(**ask("loader", asked))
    seen, pictures = [], []
    for _ in range(2):
        batches = ask("batches", iter(ask("epoch", loader)), loader)
        for images, labels in batches:
            seen += labels.tolist()
            pictures += list(images)
    return answers, seen, pictures


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return broken_photographs(tmp_path_factory.mktemp("large"), size=(720, 660))


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_a_lever_named_after_it_acts_on_filled_batches(name, large):
    answers, seen, pictures = played(["skip_unreadable", name], large)

    assert seen == SEEN * 2
    assert what_was_left_out().count == 6
    assert answers.keys() <= ({name} & NEEDS_ALL), answers
    own = Prepared(large)
    close = 0.2 if name == "scaled_decode" else 0
    for picture, label in zip(pictures, seen, strict=True):
        assert torch.allclose(picture, own[label][0], atol=close, rtol=0)


@pytest.mark.parametrize("first", [True, False])
def test_a_set_that_is_kept_whole_is_picked_from_as_ever(first):
    kept, skip = DeviceCache(), SkipUnreadable()
    loader = DataLoader(**kept.loader({"dataset": Numbers(), "batch_size": 4, "num_workers": 2}))

    for lever in (skip, kept) if first else (kept, skip):
        lever.epoch(loader)
    batches = kept.batches(iter(loader), loader)

    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_a_lever_named_before_it_acts_or_says_what_it_could_not_read(name, large):
    answers, seen, _ = played([name, "skip_unreadable"], large)

    assert seen == SEEN * 2
    assert what_was_left_out().count == 6
    assert all("image file is truncated" in said for said in answers.values()), answers
