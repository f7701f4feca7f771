"""Data that are packed for a tuning: what a sample says of all, and when all are packed."""

import numpy as np
import pytest
from PIL import Image

from flatout.records.errors import UserError
from flatout.techniques.data.packed_data import STORES, PackedData
from flatout.workflow.pack_for_tuning import STORE, PackCost, cost_of, pack_for_tuning
from tests.techniques.facts import loader, machine, profile
from tests.workflow.test_tune import World, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A folder of pictures, and no store that anything else named."""
    monkeypatch.setenv(STORES, "")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pictures" / "one"
    folder.mkdir(parents=True)
    dice = np.random.default_rng(0)
    for number in range(100):
        pixels = dice.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return folder.parent


def offered():
    waiting = profile(phases_ms={"data_wait": 100.0}, loaders=(loader(),))
    return [option.path for option in PackedData.candidates(waiting, machine())]


def test_a_sample_says_what_all_would_take(pictures, tmp_path):
    kind, cost = cost_of(str(pictures), tmp_path)

    assert (kind, cost.samples, cost.seen) == ("raw", 100, 64)
    assert 100 * 16 * 16 * 3 < cost.bytes < 2 * 100 * 16 * 16 * 3
    assert cost.seconds > 0


def test_what_takes_a_small_part_of_the_budget_is_packed_and_offered(pictures, tmp_path):
    out = tmp_path / "out"
    out.mkdir()

    cost = pack_for_tuning(str(pictures), out, 1e6, lambda _: None)

    assert cost.is_packed
    assert cost.sentence.startswith(f"packing the 100 samples of {pictures} took")
    assert offered() == [str((out / STORE).resolve())]


def test_what_takes_more_is_not_packed_and_its_cost_and_command_are_named(pictures, tmp_path):
    cost = pack_for_tuning(str(pictures), tmp_path, 1e-6, lambda _: None)

    assert not cost.is_packed
    assert "100 samples" in cost.sentence
    assert f"`flatout pack {pictures} data.packed --encode raw`" in cost.sentence
    assert not (tmp_path / STORE).exists()
    assert offered() == []


def test_a_store_that_would_fill_the_disk_does_not_fit():
    cost = PackCost(target="x", samples=1, seconds=1.0, bytes=6, free_bytes=10)

    assert not cost.fits(600.0)


def test_data_that_are_not_there_end_the_tuning_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    world = World({})

    with pytest.raises(UserError):
        run(world, tmp_path / "out", pack=str(tmp_path / "nothing"))

    assert world.asked == []


def test_the_report_says_what_the_packing_took(pictures, tmp_path):
    ablation = run(World({}), tmp_path / "out", only=("bf16_autocast",), pack=str(pictures))

    assert ablation.notes[0].startswith("packing the 100 samples")
    assert (tmp_path / "out" / STORE).is_dir()


def test_the_next_tuning_of_the_same_process_is_not_offered_what_this_one_packed(
    pictures, tmp_path
):
    run(World({}), tmp_path / "out", only=("bf16_autocast",), pack=str(pictures))

    assert offered() == []
